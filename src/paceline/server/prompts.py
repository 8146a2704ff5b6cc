"""From a request's prompt or messages to checked token ids. Rendering and tokenising run in a few threads, off the
event loop."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.checkpoint.chat_template import ChatTemplate, chat_prompt
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.engine.invalid import InvalidRequest
from paceline.engine.limits import Limits
from paceline.engine.sampling_params import SamplingParams
from paceline.server.errors import busy, invalid

T = TypeVar("T")

MESSAGE_KEYS = {"role", "content", "name", "tool_call_id"}
MAX_NAME_CHARS = 256
"""Of ``role``, ``name`` and ``tool_call_id``."""


@dataclass(slots=True)
class Prompt:
    ids: list[int]
    text: str | None
    """As the client wrote it, or decoded from its ids if that is needed."""
    as_text: bool
    """Whether the client sent the text, not ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A checked chat request."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]


class PromptEncoder:
    """Renders, tokenises and checks prompts.

    Args:
        tokenizer: of the model.
        template: of the model, if it has one.
        limits: of the engine.
        threads: how many requests are worked on at once; others wait.
        max_pending: how many may wait; others get a 429.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, limits: Limits, *, threads: int, max_pending: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self._pending = 0
        self._max_pending = max_pending
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        longest = max((len(token) for token in tokenizer.backend.get_vocab()), default=1)
        self._max_chars = limits.max_model_len * longest

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def prompts(
        self, prompts: list[str | list[int]], params: SamplingParams, add_special_tokens: bool, need_text: bool
    ) -> list[Prompt]:
        """Checked prompts; with ``need_text`` ids are decoded too. Raises InvalidRequest."""

        def work() -> list[Prompt]:
            checked = []
            for prompt in prompts:
                text = prompt if isinstance(prompt, str) else None
                if isinstance(prompt, str):
                    ids = self._encode(prompt, add_special_tokens)
                else:
                    self._check_ids("prompt", prompt)
                    ids = prompt
                self._limits.check(ids, params)
                if need_text and text is None:
                    text = self._tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
                checked.append(Prompt(ids, text, as_text=isinstance(prompt, str)))
            return checked

        return await self._run(work)

    async def chat(self, conversation: Conversation, params: SamplingParams, names: Mapping[str, str]) -> Prompt:
        """The rendered conversation as a checked prompt. Raises InvalidRequest; ``names`` maps fields of `Limits.check`
        to those that the client sent."""

        def work() -> Prompt:
            ids = self._chat_ids(conversation)
            try:
                self._limits.check(ids, params)
            except InvalidRequest as error:
                raise InvalidRequest(names.get(error.field, error.field), error.message) from error
            return Prompt(ids, None, as_text=False)

        return await self._run(work)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await self._run(lambda: self._encode(text, add_special_tokens))

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        return await self._run(lambda: self._chat_ids(conversation))

    async def decode(self, ids: list[int]) -> str:
        """All of ``ids`` as text, special tokens included. Raises InvalidRequest for an id outside the vocabulary."""

        def work() -> str:
            self._check_ids("tokens", ids)
            for token in ids:
                if not 0 <= token < self._limits.vocab_size:
                    top = self._limits.vocab_size - 1
                    raise InvalidRequest("tokens", f"token id {token} is outside the vocabulary, 0 to {top}")
            return self._tokenizer.decode(ids, skip_special_tokens=False)

        return await self._run(work)

    async def names(self, ids: list[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return await self._run(lambda: [self._tokenizer.token(token) for token in ids])

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self._check_chars("prompt", len(text))
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _chat_ids(self, conversation: Conversation) -> list[int]:
        if self._template is None:
            raise InvalidRequest("messages", "the model has no chat template; use /v1/completions")
        self._check_chars("messages", sum(_chars(message["content"]) for message in conversation.messages))
        return chat_prompt(
            self._tokenizer,
            self._template,
            conversation.messages,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            kwargs=conversation.template_kwargs,
            max_chars=self._max_chars,
        )

    def _check_chars(self, field: str, chars: int) -> None:
        """Refuses text that cannot fit whatever its tokens are, before the work of tokenising it."""
        if chars > self._max_chars:
            raise InvalidRequest(
                field, f"{chars} characters cannot fit the context of {self._limits.max_model_len} tokens"
            )

    def _check_ids(self, field: str, ids: list[Any]) -> None:
        """Refuses what cannot fit before any of it is looked at."""
        if len(ids) > self._limits.max_model_len:
            raise InvalidRequest(field, f"{len(ids)} ids exceed the context of {self._limits.max_model_len}")

    async def _run(self, work: Callable[[], T]) -> T:
        if self._pending >= self._max_pending:
            raise busy(f"{self._pending} requests wait to be tokenised; try again later")
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._pending -= 1


def parse_prompts(value: Any, max_prompts: int) -> list[str | list[int]]:
    """A string, token ids, or a list of either, as a list. Ids are checked later, by `Limits.check`."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid("prompt", "must be a string, a list of token ids, or a list of either, and not empty")
    if not any(isinstance(item, (str, list)) for item in value):
        return [value]
    if not all(isinstance(item, (str, list)) for item in value):
        raise invalid("prompt", "mixes token ids with strings or lists")
    if len(value) > max_prompts:
        raise invalid("prompt", f"has {len(value)} prompts; the most is {max_prompts}")
    return value


def parse_conversation(
    messages: Any,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any] | None,
    max_messages: int,
) -> Conversation:
    """Raises a 400 that names the message and key at fault, or the limit: ``max_messages`` bounds the messages, and the
    parts of all their contents."""
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list of at least one message")
    if len(messages) > max_messages:
        raise invalid("messages", f"has {len(messages)} messages; the most is {max_messages}")
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > max_messages:
        raise invalid("messages", f"has {parts} content parts; the most is {max_messages}")
    if continue_final_message and add_generation_prompt:
        raise invalid("continue_final_message", "cannot go with add_generation_prompt=true")
    return Conversation(
        messages=[_message(f"messages.{index}", message) for index, message in enumerate(messages)],
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=bool(continue_final_message),
        template_kwargs=template_kwargs or {},
    )


def _message(path: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(path, "must be an object")
    # SDKs send what they got, with null or empty for what was not used.
    message = {key: value for key, value in message.items() if key == "content" or value not in (None, [], {})}
    for key in message:
        if key not in MESSAGE_KEYS:
            raise invalid(f"{path}.{key}", "is not supported by this server")
        if key != "content" and not isinstance(message[key], str):
            raise invalid(f"{path}.{key}", "must be a string")
        if key != "content" and len(message[key]) > MAX_NAME_CHARS:
            raise invalid(f"{path}.{key}", f"must have at most {MAX_NAME_CHARS} characters")
    if not message.get("role"):
        raise invalid(f"{path}.role", "is missing")
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(f"{path}.content.{index}", part)
    elif not isinstance(content, str):
        raise invalid(f"{path}.content", "must be a string or a list of text parts")
    return message


def _chars(content: str | list[dict[str, Any]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _check_part(path: str, part: Any) -> None:
    if not isinstance(part, dict):
        raise invalid(path, "must be an object")
    if part.get("type") != "text":
        raise invalid(f"{path}.type", f"{part.get('type')!r} is not supported by this server; only text is")
    if not isinstance(part.get("text"), str):
        raise invalid(f"{path}.text", "must be a string")
    if extra := part.keys() - {"type", "text"}:
        raise invalid(f"{path}.{min(extra)}", "is not supported by this server")
