"""What the core returns, made into what a caller sees: text, trimmed at a stop, as deltas and as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from paceline.engine.detokenizer import Detokenizer, begins_text, token_bytes
from paceline.engine.request import CoreOutput, Finish
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import TokenLogprobs
from paceline.engine.stop import StopStrings


@dataclass(slots=True, kw_only=True)
class Delta:
    """What one push added to one candidate. ``text`` may be empty while a character or a stop string is unfinished."""

    candidate: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    """Every token of the output is in exactly one delta, the one that ended it included."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per id, when the request asked for logprobs."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Entries for prompt tokens 1, 2, ...: once, on candidate 0's first delta."""
    finish: Finish | None = None
    stop: str | int | None = None
    """The stop string, or the stop or end-of-sequence id, that ended it."""
    error: str = ""
    """Set with ``Finish.ERROR``."""
    cached_tokens: int = 0
    queued_s: float = 0.0


class OutputProcessor:
    """Turns the core's outputs for one request into deltas.

    Stop strings count from token ``min_tokens`` on: one that is complete before is ordinary text, one that starts
    before and is completed at or after it ends the reply. A stop in the text ends a candidate at the token that
    completed it: later ids and logprobs are dropped, and the core does not know yet, so the caller must abort the
    candidate there (``delta.stop`` is a ``str``).

    A stop or end-of-sequence id is in ``ids`` but not in ``text``; with ``include_stop_str_in_output`` its text is
    there too, unless it is a special token that is skipped.

    Args:
        backend: the model's tokenizer.
        prompt_ids: what comes before the output; only decides whether the first token keeps its leading space.
        params: of the request.
    """

    def __init__(self, backend: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        table = token_bytes(backend, params.skip_special_tokens)
        begun = begins_text(table, prompt_ids)
        self._params = params
        self._live = {candidate: _Candidate(Detokenizer(table, begun), params) for candidate in range(params.n)}

    @property
    def finished(self) -> bool:
        """Whether all candidates have ended."""
        return not self._live

    def push(self, output: CoreOutput) -> Delta | None:
        """The delta that ``output`` makes, or None when its candidate has already ended."""
        state = self._live.get(output.candidate)
        if state is None:
            return None
        delta = state.push(output)
        if delta.finish is not None:
            del self._live[output.candidate]
        return delta


class _Candidate:
    __slots__ = ("_detokenizer", "_drop_stop_id", "_min_tokens", "_stops", "_tokens")

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._drop_stop_id = not params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._tokens = 0

    def push(self, output: CoreOutput) -> Delta:
        delta = Delta(
            candidate=output.candidate,
            ids=output.ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish=output.finish,
            stop=output.stop_id,
            error=output.error,
            cached_tokens=output.cached_tokens,
            queued_s=output.queued_s,
        )
        shown = len(output.ids)
        if output.stop_id is not None and self._drop_stop_id:
            shown -= 1
        if self._stops is None:
            push = self._detokenizer.push
            delta.text = push(output.ids[0]) if shown == 1 else "".join(map(push, output.ids[:shown]))
        elif self._watch(delta, shown, self._stops):
            return delta
        if delta.finish is not None:
            held = "" if self._stops is None else self._stops.flush()
            delta.text += held + self._detokenizer.flush()
        return delta

    def _watch(self, delta: Delta, shown: int, stops: StopStrings) -> bool:
        """Fills ``delta.text`` from its first ``shown`` ids; whether a stop string ended it, which trims ``delta``."""
        parts: list[str] = []
        stop: str | None = None
        for index in range(shown):
            self._tokens += 1
            piece = self._detokenizer.push(delta.ids[index])
            text, stop = stops.push(piece, self._tokens >= self._min_tokens)
            parts.append(text)
            if stop is not None:
                delta.ids = delta.ids[: index + 1]
                delta.logprobs = delta.logprobs[: index + 1] if delta.logprobs is not None else None
                delta.finish, delta.stop, delta.error = Finish.STOP, stop, ""
                break
        delta.text = "".join(parts)
        return stop is not None


@dataclass(slots=True)
class CompletionOutput:
    """One candidate of a request, as far as it has come."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token id, when the request asked for logprobs."""
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    error: str = ""
    _parts: list[str] = field(default_factory=list, repr=False, compare=False)  # However many deltas it came in.

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, delta: Delta) -> None:
        self._parts.append(delta.text)
        self.token_ids += delta.ids
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs
        self.finish_reason = delta.finish
        self.stop_reason = delta.stop
        self.error = delta.error


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    """Of all candidates, as far as they are part of the reply."""
    cached_tokens: int
    """Prompt tokens that the prefix cache supplied."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class RequestOutput:
    """The whole answer to a request: the sum of its deltas.

    Attributes:
        prompt_ids: as given.
        prompt_logprobs: entries for prompt tokens 1, 2, ...; None unless asked for.
        outputs: one per candidate.
        queued_s: seconds from arrival to first admission.
    """

    def __init__(self, prompt_ids: list[int], n: int = 1) -> None:
        self.prompt_ids = prompt_ids
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.outputs = [CompletionOutput(index) for index in range(n)]
        self.cached_tokens = 0
        self.queued_s = 0.0

    def add(self, delta: Delta) -> None:
        self.outputs[delta.candidate].add(delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.queued_s = max(self.queued_s, delta.queued_s)

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def usage(self) -> Usage:
        tokens = sum(len(output.token_ids) for output in self.outputs)
        return Usage(len(self.prompt_ids), tokens, self.cached_tokens)
