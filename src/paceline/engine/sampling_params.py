"""How one request wants its tokens chosen, and when to stop."""

import math
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.invalid import InvalidRequest

GREEDY_BELOW = 1e-3
"""Temperatures under this are greedy: dividing by them overflows and could not change the argmax anyway."""

MAX_CANDIDATES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request. Values are checked on construction.

    Raises:
        InvalidRequest: a value is out of range; names the field and the limit.
    """

    n: int = 1
    """Candidates drawn for the prompt, each with its own random stream."""
    temperature: float = 1.0
    """0, or anything under ``GREEDY_BELOW``, takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this. 0 keeps one token."""
    top_k: int = 0
    """Keep the k most likely tokens. 0 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence among the generated tokens."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in the prompt or the output (CTRL, arXiv:1909.05858)."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    allowed_token_ids: tuple[int, ...] = ()
    """When given, only these ids can be sampled."""
    seed: int | None = None
    """Makes the draws repeatable. Without one every request draws its own."""
    stop: tuple[str, ...] = ()
    """Text that ends the reply; it is cut from the text unless ``include_stop_str_in_output``."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the reply, beside the model's own end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence ids."""
    min_tokens: int = 0
    """No end-of-sequence id or stop id can be sampled, and no stop string ends the reply, before this many tokens."""
    max_tokens: int | None = 16
    """Most tokens to generate. None: as many as the context allows."""
    logprobs: int | None = None
    """Return the log-probability of each token, and of this many most likely alternatives (0: of the token alone)."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, MAX_CANDIDATES)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0)
        _whole("top_k", self.top_k, 0, None)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _whole("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _whole("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, None)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                _whole(name, count, 0, MAX_LOGPROBS)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, None)
            _real("logit_bias", bias, -100.0, 100.0)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name):
                _whole(name, token, 0, None)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"{len(self.stop)} strings; the most is {MAX_STOP_STRINGS}")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequest("stop", "every stop must be a non-empty string")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0.0

    @property
    def penalises(self) -> bool:
        """Whether sampling needs to know which tokens came before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _whole(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, f"must be a whole number, not {value!r}")
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(name, f"must be {limits}, not {value}")


def _real(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(name, f"must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(name, f"must be from {low:g} to {high:g}, not {value:g}")
