"""What replies of both endpoints have in common."""

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from paceline.engine.output import Delta, RequestOutput, Usage
from paceline.engine.request import Finish
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import TokenLogprobs
from paceline.server.fields import StreamUsage
from paceline.server.prompts import Prompt

_json = msgspec.json.Encoder()


def event(content: object) -> bytes:
    """A server-sent event of strict JSON."""
    return b"data: %b\n\n" % _json.encode(content)


class Reply(ABC):
    """Makes the JSON of one reply. The same code makes a choice of a whole reply and of a chunk, from all that a
    sequence said or from one delta.

    Args:
        prompts: of the request.
        params: of every prompt.
        model: name to report.
        stream_usage: when a stream tells its usage.
    """

    prefix: str
    """Of the id."""
    whole_object: str
    chunk_object: str
    text_only: bool
    """Whether chunks that neither begin nor end a choice differ in nothing but their text."""

    def __init__(self, prompts: list[Prompt], params: SamplingParams, model: str, stream_usage: StreamUsage) -> None:
        self.prompts = prompts
        self.params = params
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._stream_usage = stream_usage
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._completion_tokens = 0
        self._cached = [0] * len(prompts)
        self._frames: dict[tuple[int, int], list[bytes]] = {}
        """Of a sequence that has begun: the event of a chunk, cut where its text is, and where its usage counts the
        tokens of the reply and of all, if it does."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The reply to a request that does not stream; ``outputs`` are complete, one a prompt."""
        choices = [
            self.choice(
                prompt,
                output.index,
                text=output.text,
                ids=output.token_ids,
                logprobs=output.logprobs,
                prompt_logprobs=request.prompt_logprobs,
                finish=output.finish_reason,
                stop=output.stop_reason,
                whole=True,
            )
            for prompt, request in enumerate(outputs)
            for output in request.outputs
        ]
        usages = [request.usage for request in outputs]
        usage = Usage(
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.cached_tokens for usage in usages),
        )
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage_json(usage)}

    def events(self, prompt: int, delta: Delta) -> bytes:
        """What a stream says about a delta, as server-sent events."""
        key = prompt, delta.candidate
        if delta.finish is None and key in self._frames:
            self._completion_tokens += len(delta.ids)
            frame, text = self._frames[key], _json.encode(delta.text)
            if len(frame) == 2:
                return b"%b%b%b" % (frame[0], text, frame[1])
            done = self._completion_tokens
            return b"%b%b%b%d%b%d%b" % (frame[0], text, frame[1], done, frame[2], self._prompt_tokens + done, frame[3])
        chunks = self.chunks(prompt, delta)
        if self.text_only and delta.finish is None:
            self._frames[key] = self._frame(prompt, delta.candidate)
        return b"".join(map(event, chunks))

    def _frame(self, prompt: int, candidate: int) -> list[bytes]:
        text, done = f"text of {self._head['id']}", self._completion_tokens
        chunk = self._chunk(prompt, Delta(candidate=candidate, text=text))
        before, after = event(chunk).split(_json.encode(text))
        if self._stream_usage != "continuous":
            return [before, after]
        counts = b'"completion_tokens":%d,"total_tokens":%d' % (done, self._prompt_tokens + done)
        head, tail = after.split(counts)
        return [before, head + b'"completion_tokens":', b',"total_tokens":', tail]

    def chunks(self, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        """What a stream says about a delta."""
        self._completion_tokens += len(delta.ids)
        if delta.cached_tokens > self._cached[prompt]:
            self._cached[prompt] = delta.cached_tokens
            self._frames.clear()  # those that tell the usage have another number
        return [self._chunk(prompt, delta)]

    def last_chunks(self) -> list[dict[str, Any]]:
        """What a stream says when every sequence has ended."""
        if self._stream_usage == "never":
            return []
        return [{**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage()}]

    def _usage(self) -> dict[str, Any]:
        """So far."""
        return usage_json(Usage(self._prompt_tokens, self._completion_tokens, sum(self._cached)))

    @abstractmethod
    def choice(
        self,
        prompt: int,
        candidate: int,
        *,
        text: str,
        ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
        finish: Finish | None,
        stop: str | int | None,
        whole: bool,
    ) -> dict[str, Any]:
        """One item of ``choices``."""

    def _chunk(self, prompt: int, delta: Delta) -> dict[str, Any]:
        choice = self.choice(
            prompt,
            delta.candidate,
            text=delta.text,
            ids=delta.ids,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            finish=delta.finish,
            stop=delta.stop,
            whole=False,
        )
        chunk = {**self._head, "object": self.chunk_object, "choices": [choice]}
        if self._stream_usage != "never":
            chunk["usage"] = self._usage() if self._stream_usage == "continuous" else None
        return chunk


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
