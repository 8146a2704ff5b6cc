"""From a request's fields to `SamplingParams`."""

from collections.abc import Collection, Mapping
from typing import Any

from paceline.engine.sampling_params import SamplingParams
from paceline.server.config import ServerConfig
from paceline.server.errors import invalid
from paceline.server.fields import ChatFields, CompletionFields, SamplingFields

MAX_PRIORITY = 2**31 - 1
MAX_SALT_CHARS = 256
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; chat has none."""


def completion_params(fields: CompletionFields, defaults: Mapping[str, Any], config: ServerConfig) -> SamplingParams:
    """Raises ApiError or InvalidRequest, each naming the field."""
    values = {"max_tokens": COMPLETION_MAX_TOKENS, **_values(fields, defaults, config)}
    if fields.logprobs is not None:
        _check_logprobs("logprobs", fields.logprobs, config)
        values["logprobs"] = fields.logprobs
        if fields.echo:
            values["prompt_logprobs"] = max(fields.logprobs, fields.prompt_logprobs or 0)
    return SamplingParams(**values)


def chat_params(fields: ChatFields, defaults: Mapping[str, Any], config: ServerConfig) -> SamplingParams:
    """Raises ApiError or InvalidRequest, each naming the field."""
    values = {"max_tokens": None, **_values(fields, defaults, config)}
    if fields.max_completion_tokens is not None:
        if fields.max_tokens not in (None, fields.max_completion_tokens):
            raise invalid("max_tokens", "differs from max_completion_tokens; give one of them")
        if fields.max_completion_tokens < 1:
            raise invalid("max_completion_tokens", f"must be at least 1, not {fields.max_completion_tokens}")
        values["max_tokens"] = fields.max_completion_tokens
    elif fields.max_tokens is not None and fields.max_tokens < 1:
        raise invalid("max_tokens", f"must be at least 1, not {fields.max_tokens}")
    if fields.top_logprobs is not None:
        if not fields.logprobs:
            raise invalid("top_logprobs", "needs logprobs=true")
        _check_logprobs("top_logprobs", fields.top_logprobs, config)
    if fields.logprobs:
        values["logprobs"] = fields.top_logprobs or 0
    return SamplingParams(**values)


def limit_names(fields: ChatFields) -> dict[str, str]:
    """Which field of a chat request stands behind each field that `Limits.check` names."""
    length = "max_tokens"
    if fields.max_completion_tokens is not None:
        length = "max_completion_tokens"
    elif fields.max_tokens is None:
        length = "min_tokens"
    return {"prompt": "messages", "max_tokens": length}


def check_min_tokens(params: SamplingParams, eos_ids: Collection[int]) -> None:
    """Raises a 400 when every id that may be sampled ends the reply, so that ``min_tokens`` cannot be reached."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    if params.min_tokens and params.allowed_token_ids and ends.issuperset(params.allowed_token_ids):
        raise invalid("min_tokens", "cannot be reached: every id of allowed_token_ids ends the reply")


def check_routing(fields: SamplingFields) -> None:
    """Raises a 400 unless ``priority`` and ``cache_salt`` are in range."""
    if fields.priority is not None and abs(fields.priority) > MAX_PRIORITY:
        raise invalid("priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {fields.priority}")
    if fields.cache_salt is not None and len(fields.cache_salt) > MAX_SALT_CHARS:
        raise invalid("cache_salt", f"must have at most {MAX_SALT_CHARS} characters")


def _values(fields: SamplingFields, defaults: Mapping[str, Any], config: ServerConfig) -> dict[str, Any]:
    values = dict(defaults)
    for name in fields.same_name:
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    if fields.max_tokens is not None:
        values["max_tokens"] = fields.max_tokens
    if fields.top_k == -1:
        # What vLLM's clients send for "off".
        values["top_k"] = 0
    if fields.n is not None and fields.n > config.max_n:
        raise invalid("n", f"must be at most {config.max_n}, not {fields.n}")
    if fields.prompt_logprobs is not None:
        _check_logprobs("prompt_logprobs", fields.prompt_logprobs, config)
        if fields.stream:
            raise invalid("prompt_logprobs", "cannot be streamed; in a stream, echo with logprobs gives them")
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(fields, name)
        if ids is not None:
            if name == "allowed_token_ids" and not ids:
                raise invalid(name, "is empty, which would allow no token")
            values[name] = tuple(dict.fromkeys(ids))
    if fields.stop is not None:
        values["stop"] = _stop(fields.stop)
    if fields.logit_bias is not None:
        values["logit_bias"] = _logit_bias(fields.logit_bias)
    return values


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise invalid("stop", "must be a string or a list of strings")
    return tuple(texts)


def _logit_bias(value: dict[str, float]) -> dict[int, float]:
    if not all(token.isascii() and token.isdecimal() and len(token) < 20 for token in value):
        raise invalid("logit_bias", "its keys must be token ids")
    biases = {int(token): bias for token, bias in value.items()}
    if len(biases) < len(value):
        raise invalid("logit_bias", "names a token id twice")
    return biases


def _check_logprobs(name: str, count: int, config: ServerConfig) -> None:
    if not 0 <= count <= config.max_logprobs:
        raise invalid(name, f"must be from 0 to {config.max_logprobs}, not {count}")
