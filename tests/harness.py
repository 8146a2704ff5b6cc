"""The equality that docs/architecture.md defines: one request, one answer, however it is served."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core import EngineCore
from paceline.engine.request import CoreOutput, Finish, Request
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import TokenLogprobs


@dataclass(frozen=True)
class Ask:
    """A request without the circumstances under which it is served."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    priority: int = 0


@dataclass
class Answer:
    """What one candidate got."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    cached_tokens: int = 0

    def take(self, output: CoreOutput) -> None:
        assert self.finish is None, "an output after the end"
        self.ids += output.ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish = output.finish
        self.cached_tokens += output.cached_tokens


def request(id: int, ask: Ask) -> Request:
    return Request(
        id=id,
        prompt=list(ask.prompt),
        params=ask.params,
        seed=ask.seed,
        priority=ask.priority,
        arrival=float(id),
    )


def serve(core: EngineCore, asks: Sequence[Ask], *, together: bool = True) -> list[list[Answer]]:
    """Serves every ask, all at once or one after the other; the core must be idle before and is idle after."""
    answers = [[Answer() for _ in range(ask.params.n)] for ask in asks]

    def drain() -> None:
        while core.has_work:
            for output in core.step():
                answers[output.request][output.candidate].take(output)
        core.check_idle()

    for id, ask in enumerate(asks):
        core.add(request(id, ask))
        if not together:
            drain()
    drain()
    return answers


def check_equal(reference: Answer, other: Answer, bound: float, *, exact: bool) -> None:
    """Asserts equal output.

    Args:
        bound: how far log-probabilities may differ.
        exact: tokens must be equal (float32). Otherwise they may part where the reference's two best tokens are
            closer than ``bound``; what follows is another text and is not compared.
    """
    if reference.prompt_logprobs is not None:
        assert other.prompt_logprobs is not None
        _check_logprobs(reference.prompt_logprobs, other.prompt_logprobs, bound, exact)
    common = next(
        (i for i, pair in enumerate(zip(reference.ids, other.ids, strict=False)) if pair[0] != pair[1]),
        min(len(reference.ids), len(other.ids)),
    )
    if common == len(reference.ids) == len(other.ids):
        assert reference.finish == other.finish
    else:
        assert not exact, f"token {common} differs: {reference.ids} and {other.ids}"
        best, second = reference.logprobs[common].top_logprobs[:2]
        assert best - second < bound, f"token {common} differs although the margin is {best - second}"
    if reference.logprobs:
        _check_logprobs(reference.logprobs[:common], other.logprobs[:common], bound, exact)


def _check_logprobs(one: Sequence[TokenLogprobs], two: Sequence[TokenLogprobs], bound: float, exact: bool) -> None:
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert abs(a.logprob - b.logprob) < bound
        if exact:
            assert all(abs(x - y) < bound for x, y in zip(a.top_logprobs, b.top_logprobs, strict=True))
