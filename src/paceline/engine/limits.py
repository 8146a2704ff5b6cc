"""What one model and engine can take; the single place where token ids and lengths of a request are checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.engine.invalid import InvalidRequest
from paceline.engine.sampling_params import SamplingParams, shown


@dataclass(frozen=True, slots=True)
class Limits:
    vocab_size: int
    """Rows of the embedding: ids 0 to ``vocab_size - 1`` may be looked up."""
    max_model_len: int
    """Prompt and output together."""

    def check(self, prompt: Sequence[Any], params: SamplingParams) -> None:
        """Raises InvalidRequest unless the request can be served. Both may be anything, as they came in."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest("sampling_params", f"must be SamplingParams, not {shown(params)}")
        if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
            raise InvalidRequest("prompt", f"must be a list of token ids, not {shown(prompt)}")
        if not prompt:
            raise InvalidRequest("prompt", "has no tokens")
        for token in prompt:
            self._check_id("prompt", token)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(params, name):
                self._check_id(name, token)
        for token in params.logit_bias:
            self._check_id("logit_bias", token)
        room = self.max_model_len - len(prompt)
        wanted = params.max_tokens if params.max_tokens is not None else max(1, params.min_tokens)
        if wanted > room:
            raise InvalidRequest(
                "max_tokens" if room >= 1 else "prompt",
                f"{len(prompt)} prompt tokens and {wanted} output tokens exceed the context of {self.max_model_len}",
            )

    def _check_id(self, field: str, token: Any) -> None:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequest(field, f"token ids are whole numbers, not {shown(token)}")
        if not 0 <= token < self.vocab_size:
            raise InvalidRequest(
                field, f"token id {shown(token)} is outside the vocabulary, 0 to {self.vocab_size - 1}"
            )
