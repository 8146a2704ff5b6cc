"""A non-blocking connection that carries one request at a time."""

import errno
import os
import socket
import ssl
from select import EPOLLIN, EPOLLOUT

from paceline.lab.client.address import Address
from paceline.lab.client.http_reply import HttpReply

RECEIVE_BYTES = 1 << 16
DONE = b"[DONE]"


class Connection:
    """Opens at once; `advance` until it is ready. A failure is an OSError."""

    __slots__ = ("_out", "_secured", "_tail", "fd", "ready", "reply", "request", "reused", "sock", "wants")

    def __init__(self, address: Address, tls: ssl.SSLContext | None, request: int | None = None) -> None:
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.fd = sock.fileno()
        self.request = request
        """Which it carries, or will."""
        self.reply = HttpReply()
        self.reused = False
        """Whether it has carried a whole one before."""
        self.wants = EPOLLOUT
        """What to wait for."""
        self.ready = False
        self._secured = False
        self._out = memoryview(b"")
        self._tail = b""
        """End of the body so far."""
        code = sock.connect_ex(address.endpoint)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(code, os.strerror(code))
        if tls is not None:
            self.sock = tls.wrap_socket(sock, server_hostname=address.tls, do_handshake_on_connect=False)

    def advance(self) -> None:
        """A socket that was not ready has become readable or writable."""
        if not self._secured:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
        if isinstance(self.sock, ssl.SSLSocket):
            self._secured = True
            try:
                self.sock.do_handshake()
            except ssl.SSLWantReadError:
                self.wants = EPOLLIN
                return
            except ssl.SSLWantWriteError:
                self.wants = EPOLLOUT
                return
        self.ready = True

    def send(self, request: int, data: bytes) -> None:
        """Begins to send, on a connection that is ready."""
        self.request = request
        self.reply = HttpReply()
        self._out = memoryview(data)
        self._tail = b""
        self.push()

    def is_done(self, body: bytes) -> bool:
        """Whether this next part of a stream completes its ``[DONE]``: no JSON before it has a line end in a string."""
        text = self._tail + body
        self._tail = text[-len(DONE) :]
        return DONE + b"\n" in text or DONE + b"\r" in text

    def push(self) -> None:
        """Sends as much as the socket takes; ``wants`` says whether there is more."""
        try:
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            self.wants = EPOLLIN | EPOLLOUT
            return
        self.wants = EPOLLIN

    def receive(self) -> bytes | None:
        """What has arrived; empty at the end, None if there is nothing yet. A TLS socket is drained, as what is inside
        it wakes nobody."""
        sock = self.sock
        try:
            data = sock.recv(RECEIVE_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        if isinstance(sock, ssl.SSLSocket):
            while data and sock.pending():
                data += sock.recv(RECEIVE_BYTES)
        return data
