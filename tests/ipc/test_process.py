"""The engine's loop, with scripted messages."""

import logging

import msgspec
import pytest
import zmq

from fake_core import fake_core
from paceline.engine.request import CoreOutput, Finish, Request
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import TokenLogprobs
from paceline.ipc.messages import CLIENT_SHIFT, Abort, Add, Join, Leave, Outputs, Ready, Shutdown, ToClient, ToEngine
from paceline.ipc.process import EngineLoop, Progress


class Inbox:
    """Gives one message, or none (None), each time that it is asked without waiting, and `Shutdown` when the loop would
    wait."""

    def __init__(self, *script: ToEngine | None) -> None:
        self.script = list(script)
        self.waits = 0

    def recv(self, flags: int = 0) -> bytes:
        message = self.script.pop(0) if self.script else None
        if message is None and flags != zmq.NOBLOCK:
            self.waits += 1
            message = Shutdown()
        if message is None:
            raise zmq.Again
        return msgspec.msgpack.encode(message)


class Outboxes:
    def __init__(self) -> None:
        self.sent: dict[int, list[ToClient]] = {0: []}
        self.gone: set[int] = set()

    def __contains__(self, client: int) -> bool:
        return client in self.sent and client not in self.gone

    def join(self, client: int) -> None:
        self.sent[client] = []

    def leave(self, client: int) -> None:
        self.gone.add(client)

    def send(self, client: int, message: ToClient) -> None:
        self.sent[client].append(message)

    def send_all(self, make: object) -> None: ...


def request(number: int, client: int = 0, **params: object) -> Add:
    sampling = SamplingParams(**{"max_tokens": 3, **params})  # type: ignore[arg-type]
    return Add(Request(id=(client << CLIENT_SHIFT) + number, prompt=[1, 2], params=sampling, seed=0, arrival=0.0))


def run(core: object, *script: ToEngine | None) -> tuple[Inbox, Outboxes, EngineLoop]:
    inbox, outboxes = Inbox(*script), Outboxes()
    loop = EngineLoop(core, inbox, outboxes, Progress())  # type: ignore[arg-type]
    loop.run()
    return inbox, outboxes, loop


def outputs(outboxes: Outboxes, client: int) -> list[CoreOutput]:
    return [output for message in outboxes.sent[client] if isinstance(message, Outputs) for output in message]


def test_idle_gaps_are_used_and_hold_no_message_up() -> None:
    """The core gets one call between two looks for messages, until it has nothing more to do; again after work."""
    core, calls = fake_core(), []
    core.idle = lambda: (calls.append(len(inbox.script)), len(calls) < 5)[1]  # type: ignore[method-assign]
    inbox = Inbox(None, None, request(1))
    EngineLoop(core, inbox, Outboxes(), Progress()).run()  # type: ignore[arg-type]
    assert calls[:2] == [2, 1], "the request came after the second call"
    assert len(calls) == 5
    assert inbox.waits == 1


def test_outputs_go_to_their_clients() -> None:
    _, outboxes, _ = run(fake_core(), Join(3), request(1), request(1, 3), request(2, 3, n=2))
    assert isinstance(outboxes.sent[3][0], Ready)
    assert {output.request >> CLIENT_SHIFT for output in outputs(outboxes, 0)} == {0}
    mine = outputs(outboxes, 3)
    assert {(output.request & 0xFF, output.candidate) for output in mine} == {(1, 0), (2, 0), (2, 1)}
    assert sum(len(output.ids) for output in mine) == 9
    assert sum(output.finish is Finish.LENGTH for output in mine) == 3


@pytest.mark.parametrize("how", ["end", "abort", "candidates", "leave"])
def test_nothing_is_kept_of_a_request(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """failure 52: however it ends, and whatever comes too late."""
    number = request(1, 3).request.id
    ends: dict[str, list[ToEngine | None]] = {
        "end": [None] * 10 + [Abort(number, 0), Abort(number)],
        "abort": [None, Abort(number), Abort(number, 1)],
        "candidates": [None, Abort(number, 0), None, Abort(number, 1), Abort(number, 1)],
        "leave": [None, Leave(3), request(2, 3), Leave(3)],
    }
    max_tokens = 3 if how == "end" else 200
    core = fake_core()
    with caplog.at_level(logging.ERROR):
        _, outboxes, loop = run(core, Join(3), request(1, 3, n=2, max_tokens=max_tokens), *ends[how])
    assert loop._open == {}
    assert not core.has_work
    core.check_idle()
    assert caplog.text == ""
    assert len(outputs(outboxes, 3)) < 20


def test_columns_lose_nothing() -> None:
    """Outputs of one token and nothing else travel as columns; all come out as they went in."""
    logprobs = [TokenLogprobs(-1.0, 1, [], [])]
    plain = [CoreOutput(request=9, candidate=1, ids=[5]), CoreOutput(request=10, candidate=0, ids=[0])]
    others = [
        CoreOutput(request=1, candidate=0, ids=[5], finish=Finish.STOP, stop_id=5),
        CoreOutput(request=2, candidate=0, ids=[5], logprobs=logprobs),
        CoreOutput(request=3, candidate=0, ids=[5], prompt_logprobs=[]),
        CoreOutput(request=4, candidate=0, ids=[5], cached_tokens=1),
        CoreOutput(request=5, candidate=0, ids=[5], queued_s=0.5),
        CoreOutput(request=6, candidate=0, ids=[5, 6]),
        CoreOutput(request=7, candidate=0, finish=Finish.ERROR, error="no"),
    ]
    message = Outputs(fake_core().stats)
    for output in [*others[:3], *plain, *others[3:]]:
        message.add(output)
    assert message.others == others
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToClient)
    assert list(sent) == [*plain, *others]
