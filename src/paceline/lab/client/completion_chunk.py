"""What an event of an OpenAI-compatible stream holds, as far as the meter needs it. Unknown fields are passed over."""

from typing import Any

from msgspec import Struct


class PromptDetails(Struct):
    cached_tokens: Any = None


class Usage(Struct):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    """A reply is no failure because its server counts wrongly: see `count_of`."""
    prompt_tokens_details: PromptDetails | None = None


class Message(Struct):
    """A chat delta; of a reply that is not streamed the whole message."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Any = None
    function_call: Any = None

    @property
    def generated(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.tool_calls
            or self.function_call
            or self.refusal
        )


class Choice(Struct):
    text: str | None = None
    delta: Message | None = None
    message: Message | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def generated(self) -> bool:
        """Whether it carries a generated token that can be seen; a role alone is none."""
        message = self.delta or self.message
        return bool(self.text or self.token_ids or (message is not None and message.generated))

    @property
    def content(self) -> str:
        message = self.delta or self.message
        return self.text or (message.content if message is not None else None) or ""


class CompletionChunk(Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None
    detail: Any = None

    @property
    def failure(self) -> str | None:
        """The message of an error object, in any of the shapes that servers use."""
        if self.error:
            return message_of(self.error)
        if self.object == "error" or (self.choices is None and self.usage is None and (self.detail or self.message)):
            return message_of(self.message or self.detail)
        return None


def count_of(value: Any) -> int | None:
    """A number of tokens; None for what is none: a string, a truth value, a fraction, a negative number."""
    return value if type(value) is int and value >= 0 else None


def message_of(error: Any) -> str:
    """The text of an ``error``, ``message`` or ``detail``: a string, or an object with a message."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("type") or error
    return str(error)[:500]
