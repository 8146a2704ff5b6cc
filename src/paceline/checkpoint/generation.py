"""Defaults that a checkpoint brings for sampling and stopping."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoint.error import CheckpointError
from paceline.engine.invalid import InvalidRequest
from paceline.engine.sampling_params import SamplingParams

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    eos_ids: tuple[int, ...] = ()
    """Ids that end a reply. Empty when the checkpoint names none."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for ``SamplingParams``; only what the checkpoint states."""


def generation_defaults(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos: int | None
) -> GenerationDefaults:
    """Translates ``generation_config.json``.

    End-of-sequence ids come from the first that has any: generation config, ``config.json``, tokenizer. In Hugging
    Face's files ``top_k`` 0 (or -1, as some write it) means off, and ``do_sample: false`` means greedy whatever the
    temperature.

    Raises:
        CheckpointError: a value that cannot be used.
    """
    eos = next((ids for source in (generation_config, config) if (ids := _ids(source.get("eos_token_id")))), None)
    if eos is None:
        eos = () if tokenizer_eos is None else (tokenizer_eos,)
    sampling = {name: generation_config[name] for name in _SAMPLING_FIELDS if generation_config.get(name) is not None}
    if sampling.get("top_k") in (0, -1):
        sampling["top_k"] = 0
    if generation_config.get("do_sample") is False:
        penalty = sampling.get("repetition_penalty")
        sampling = {"temperature": 0.0} | ({"repetition_penalty": penalty} if penalty is not None else {})
    try:
        SamplingParams(**sampling)
    except InvalidRequest as error:
        raise CheckpointError(f"generation_config.json: {error}") from error
    return GenerationDefaults(eos, sampling)


def _ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(dict.fromkeys(ids))
