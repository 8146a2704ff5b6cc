"""How one request wants its tokens chosen, and when to stop."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.invalid import InvalidRequest

GREEDY_BELOW = 1e-3
"""Temperatures under this are greedy: dividing by them overflows and could not change the argmax anyway."""

MAX_CANDIDATES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
"""Of counts of tokens, and of token ids: beyond every model, and within what a message carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request. Values are checked on construction.

    ``stop`` may be one string. Lists do for tuples, and None for an empty ``logit_bias``, ``allowed_token_ids``,
    ``stop`` or ``stop_token_ids``.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range; names the field and the limit.
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
        self._whole("n", 1, MAX_CANDIDATES)
        self._real("temperature", 0.0, 100.0)
        self._real("top_p", 0.0, 1.0)
        self._whole("top_k", 0, MAX_COUNT)
        self._real("min_p", 0.0, 1.0)
        self._real("presence_penalty", -2.0, 2.0)
        self._real("frequency_penalty", -2.0, 2.0)
        self._real("repetition_penalty", 0.01, 100.0)
        self._whole("min_tokens", 0, MAX_COUNT)
        for name, low, high in (
            ("seed", -MAX_SEED - 1, MAX_SEED),
            ("max_tokens", 0, MAX_COUNT),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                self._whole(name, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, f"must be true or false, not {shown(getattr(self, name))}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = self._items(name, "token ids")
            self._set(name, tuple(whole(name, token, 0, MAX_COUNT) for token in ids))
        self._set("logit_bias", self._checked_bias())
        self._set("stop", self._checked_stop())

    def _checked_bias(self) -> dict[int, float]:
        bias: Any = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise InvalidRequest("logit_bias", f"must map token ids to numbers, not {shown(bias)}")
        return {
            whole("logit_bias", token, 0, MAX_COUNT): _real("logit_bias", value, -100.0, 100.0)
            for token, value in bias.items()
        }

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else self._items("stop", "strings")
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"{len(stop)} strings; the most is {MAX_STOP_STRINGS}")
        if any(not isinstance(item, str) or not item for item in stop):
            raise InvalidRequest("stop", "every stop must be a non-empty string")
        return tuple(text("stop", item) for item in stop)

    def _items(self, name: str, what: str) -> Sequence[Any]:
        items = getattr(self, name)
        if items is None:
            return ()
        if not isinstance(items, Sequence) or isinstance(items, str | bytes):
            raise InvalidRequest(name, f"must be a list of {what}, not {shown(items)}")
        return items

    def _whole(self, name: str, low: int, high: int) -> None:
        self._set(name, whole(name, getattr(self, name), low, high))

    def _real(self, name: str, low: float, high: float) -> None:
        self._set(name, _real(name, getattr(self, name), low, high))

    def _set(self, name: str, value: Any) -> None:
        """The checked value in the field's own type: subclasses, such as NumPy's float, do not travel."""
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0.0

    @property
    def penalises(self) -> bool:
        """Whether sampling needs to know which tokens came before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def whole(field: str, value: Any, low: int, high: int) -> int:
    """``value``, which must be a whole number from ``low`` to ``high``. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(field, f"must be a whole number, not {shown(value)}")
    if not low <= value <= high:
        raise InvalidRequest(field, f"must be from {low} to {high}, not {shown(value)}")
    return int(value)


def text(field: str, value: Any) -> str:
    """``value``, which must be a string that UTF-8 can carry. Raises InvalidRequest."""
    if not isinstance(value, str):
        raise InvalidRequest(field, f"must be a string, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"holds a lone surrogate at {error.start}, which no text has") from error
    return str(value)


def shown(value: Any) -> str:
    """``value`` in an error message, whatever its size."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)


def _real(field: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == math.inf:
        raise InvalidRequest(field, f"must be a finite number, not {shown(value)}")
    if not low <= value <= high:
        raise InvalidRequest(field, f"must be from {low:g} to {high:g}, not {shown(value)}")
    return float(value)
