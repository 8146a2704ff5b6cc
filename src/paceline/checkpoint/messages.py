"""The messages of a chat, checked and brought into the form that a template takes."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paceline.engine.invalid import InvalidRequest

ContentFormat = Literal["string", "parts"]
"""Content as one string, or as a list of ``{"type": "text", "text": ...}``."""

Message = dict[str, Any]


def checked_messages(
    messages: Sequence[Mapping[str, Any]], formats: Mapping[str, ContentFormat], default: ContentFormat
) -> list[Message]:
    """Copies of the messages with ``content`` in the format of their role; other keys stay as they are.

    Raises:
        InvalidRequest: field ``messages``, naming the message: no role, no content, or content that is not text.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages", "must be a list of at least one message")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest("messages", f"message {index} is not an object")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest("messages", f"message {index} has no role")
        texts = _texts(index, message)
        checked.append({**message, "content": shaped(texts, formats.get(role, default))})
    return checked


def shaped(texts: Sequence[str], form: ContentFormat) -> Any:
    """Text parts in the form that a template takes; parts of a string are joined by newlines."""
    return "\n".join(texts) if form == "string" else [{"type": "text", "text": text} for text in texts]


def with_suffix(message: Message, suffix: str) -> tuple[Message, str]:
    """A message with text added at its end, and the text before it (of the last part)."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + suffix}, content
    text = content[-1]["text"]
    return {**message, "content": [*content[:-1], {"type": "text", "text": text + suffix}]}, text


def _texts(index: int, message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if content is None and message.get("role") == "assistant" and message.get("tool_calls"):
        return [""]
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, Sequence) or not parts:
        raise InvalidRequest("messages", f"message {index}: content must be a string or a list of text parts")
    texts = []
    for part in parts:
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise InvalidRequest("messages", f"message {index}: {part['type']!r} parts are not supported, only text")
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise InvalidRequest("messages", f"message {index}: a text part must hold a string")
        texts.append(text)
    return texts
