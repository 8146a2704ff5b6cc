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
        include_usage: whether a stream ends with a usage chunk.
    """

    prefix: str
    """Of the id."""
    whole_object: str
    chunk_object: str
    text_only: bool
    """Whether chunks that neither begin nor end a choice differ in nothing but their text."""

    def __init__(self, prompts: list[Prompt], params: SamplingParams, model: str, include_usage: bool) -> None:
        self.prompts = prompts
        self.params = params
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._completion_tokens = 0
        self._cached = [0] * len(prompts)
        self._frames: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        """Of a sequence that has begun: the event of a chunk, up to its text and from there on."""

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
            before, after = self._frames[key]
            return b"%b%b%b" % (before, _json.encode(delta.text), after)
        chunks = self.chunks(prompt, delta)
        if self.text_only and delta.finish is None:
            mark = f"text of {self._head['id']}"
            before, after = event(self._chunk(prompt, Delta(candidate=delta.candidate, text=mark))).split(
                _json.encode(mark)
            )
            self._frames[key] = before, after
        return b"".join(map(event, chunks))

    def chunks(self, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        """What a stream says about a delta."""
        self._completion_tokens += len(delta.ids)
        self._cached[prompt] = max(self._cached[prompt], delta.cached_tokens)
        return [self._chunk(prompt, delta)]

    def last_chunks(self) -> list[dict[str, Any]]:
        """What a stream says when every sequence has ended."""
        if not self._include_usage:
            return []
        prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        usage = Usage(prompt_tokens, self._completion_tokens, sum(self._cached))
        return [{**self._head, "object": self.chunk_object, "choices": [], "usage": usage_json(usage)}]

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
        if self._include_usage:
            chunk["usage"] = None
        return chunk


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
