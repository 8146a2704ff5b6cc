"""From prompts to requests: what `LLM` and `AsyncLLM` share."""

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.chat_template import ChatTemplate, chat_prompt
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.generation import GenerationDefaults
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.engine.invalid import InvalidRequest
from paceline.engine.output import OutputProcessor
from paceline.engine.request import Request
from paceline.engine.sampling_params import MAX_SEED, SamplingParams, shown, text, whole

Prompt = str | Sequence[int]
"""Text, or token ids. Text gets the special tokens that the tokenizer adds by itself, such as a BOS."""

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``, as chat templates take it."""

_CHAT_OPTIONS: dict[str, type] = {"add_generation_prompt": bool, "continue_final_message": bool, "kwargs": Mapping}


class Front:
    """What turns prompts into requests: the parts of a checkpoint that need no weights.

    Args:
        first_id: where the ids of requests start.
    """

    def __init__(self, checkpoint: Checkpoint, first_id: int = 0) -> None:
        self.tokenizer: Tokenizer = checkpoint.tokenizer()
        self.chat_template: ChatTemplate | None = checkpoint.chat_template()
        self.generation: GenerationDefaults = checkpoint.generation
        self._ids = itertools.count(first_id)

    def defaults(self, **fields: Any) -> SamplingParams:
        return SamplingParams(**{**self.generation.sampling, **fields})

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not is_list(prompt):
            raise InvalidRequest("prompt", f"must be text or a list of token ids, not {shown(prompt)}")
        return list(prompt)

    def chat_ids(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        if self.chat_template is None:
            raise InvalidRequest("messages", "the model has no chat template; use a plain prompt")
        if not is_list(messages):
            raise InvalidRequest("messages", f"must be a list, not {shown(messages)}")
        if "tools" in options:
            raise InvalidRequest("tools", "tools are not supported yet")
        for name in options:
            if name not in _CHAT_OPTIONS:
                known = ", ".join(_CHAT_OPTIONS)
                raise InvalidRequest(name, f"is no option of a chat; these are: {known}")
        for name, kind in _CHAT_OPTIONS.items():
            if name in options and not isinstance(options[name], kind):
                what = "true or false" if kind is bool else "a mapping"
                raise InvalidRequest(name, f"must be {what}, not {shown(options[name])}")
        for index, message in enumerate(messages):
            for name in ("tool_calls", "function_call"):
                if isinstance(message, Mapping) and message.get(name):
                    raise InvalidRequest("messages", f"message {index}: {name} are not supported yet")
        return chat_prompt(self.tokenizer, self.chat_template, messages, **options)

    def request(
        self, prompt_ids: list[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Request:
        """Raises InvalidRequest for a priority or salt that is none."""
        seed = secrets.randbits(64) - 2**63 if params.seed is None else params.seed
        return Request(
            id=next(self._ids),
            prompt=prompt_ids,
            params=params,
            seed=seed,
            arrival=time.monotonic(),
            priority=whole("priority", priority, -MAX_SEED - 1, MAX_SEED),
            cache_salt=text("cache_salt", cache_salt),
        )

    def processor(self, request: Request) -> OutputProcessor:
        return OutputProcessor(self.tokenizer.backend, request.prompt, request.params)


def is_list(value: Any) -> bool:
    """Whether a caller means several things: a sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
