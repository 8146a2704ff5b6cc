"""Chat messages to prompt text, by the template that the checkpoint ships."""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.json_file import read_json
from paceline.checkpoint.messages import ContentFormat, Message, checked_messages, shaped, with_suffix
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.engine.invalid import InvalidRequest

MAX_RENDERED = 16_000_000
"""Characters of a rendered prompt; far above any context."""
MAX_KWARG_LENGTH = 1_000
MAX_KWARG_NUMBER = 1_000_000

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's part for training; for a prompt it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **style: Any) -> str:
    """Unlike jinja's own, does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **style)


def _environment() -> ImmutableSandboxedEnvironment:
    """What Hugging Face's templates expect to find."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    return environment


class ChatTemplate:
    """A compiled chat template.

    Templates come from the checkpoint only, never from a request, and run in jinja's sandbox. Message text that spells
    a control token (``<|im_end|>``) reaches the prompt as it is and becomes that token: see ``Tokenizer``.

    Args:
        source: the template.
        tool_source: another one for requests with tools, where the checkpoint has two.
        special_tokens: variables such as ``bos_token`` that the template sees.

    Raises:
        CheckpointError: the template does not parse.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        environment = _environment()
        sources = [source] if tool_source is None else [source, tool_source]
        try:
            self._template, self._tool_template = (environment.from_string(text) for text in (sources[0], sources[-1]))
            trees = [environment.parse(text) for text in sources]
        except TemplateError as error:
            raise CheckpointError(f"the chat template does not parse: {error}") from error
        used = set().union(*(meta.find_undeclared_variables(tree) for tree in trees))
        self._tokens = {"bos_token": "", "eos_token": "", **(special_tokens or {})}
        self._extra = used - _GIVEN - self._tokens.keys() - environment.globals.keys()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: each with ``role`` and ``content``, a string or a list of text parts; it is handed over in the
                form that the template takes. Parts are joined by newlines for templates that take strings.
            add_generation_prompt: end with the opening of an assistant turn.
            continue_final_message: leave the last message, the assistant's, open: the prompt ends with its text.
                No generation prompt is added then.
            kwargs: further variables for the template, such as ``enable_thinking``: only ones that it uses, only
                plain values.

        Raises:
            InvalidRequest: field ``messages``, when the messages are malformed, the template rejects them (with its
                own message) or the last one cannot be continued; field ``chat_template_kwargs`` for a bad variable.
        """
        extra = self._checked_kwargs(kwargs or {})
        chat = checked_messages(messages, self.content_formats, self.content_formats["user"])
        if not continue_final_message:
            return self._run(chat, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra)
        if chat[-1]["role"] != "assistant":
            raise InvalidRequest("messages", "only a last message from the assistant can be continued")
        mark = secrets.token_hex(16)
        chat[-1], text = with_suffix(chat[-1], mark)
        head, found, tail = self._run(chat, add_generation_prompt=False, tools=tools, extra=extra).partition(mark)
        if not found or mark in tail or not head.endswith(text):
            raise InvalidRequest(
                "messages", "the model's chat template rewrites the last message, so that it cannot be continued"
            )
        return head

    def _run(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        template = self._tool_template if tools else self._template
        variables = {**self._tokens, **(extra or {}), "messages": messages, "tools": tools or None, "documents": None}
        pieces, length = [], 0
        try:
            for piece in template.generate(variables, add_generation_prompt=add_generation_prompt):
                length += len(piece)
                if length > MAX_RENDERED:
                    raise InvalidRequest("messages", f"the prompt exceeds {MAX_RENDERED} characters")
                pieces.append(piece)
        except InvalidRequest:
            raise
        except TemplateError as error:
            raise InvalidRequest("messages", error.message or "rejected by the model's chat template") from error
        except Exception as error:  # whatever the template's expressions raise on these messages
            raise InvalidRequest("messages", f"the model's chat template fails on them: {error}") from error
        return "".join(pieces)

    def _checked_kwargs(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, value in kwargs.items():
            if name not in self._extra:
                known = ", ".join(sorted(self._extra)) or "none"
                raise InvalidRequest(
                    "chat_template_kwargs", f"{name} is no variable that can be set; these can: {known}"
                )
            if value is not None and not isinstance(value, (str, bool, int, float)):
                raise InvalidRequest("chat_template_kwargs", f"{name} must be a plain value")
            if isinstance(value, str) and len(value) > MAX_KWARG_LENGTH:
                raise InvalidRequest("chat_template_kwargs", f"{name} is longer than {MAX_KWARG_LENGTH} characters")
            if isinstance(value, (int, float)) and not abs(value) <= MAX_KWARG_NUMBER:
                raise InvalidRequest("chat_template_kwargs", f"{name} must be from 0 to ±{MAX_KWARG_NUMBER}")
        return kwargs

    @cached_property
    def content_formats(self) -> Mapping[str, ContentFormat]:
        """Role -> the form of content that the template prints, found by trying both; a string where both work."""
        user = self._probe([], {"role": "user"}, [], "string")
        question = {"role": "user", "content": shaped(["x"], user)}
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
        calling = {"role": "assistant", "content": shaped(["x"], user), "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "name": "f"}
        return {
            "user": user,
            "system": self._probe([], {"role": "system"}, [question], user),
            "assistant": self._probe([question], {"role": "assistant"}, [question], user),
            "tool": self._probe([question, calling], result, [], user),
        }

    def _probe(
        self, before: list[Message], message: Message, after: list[Message], default: ContentFormat
    ) -> ContentFormat:
        """The form in which the text of ``message`` reaches the prompt, and not as a printed list."""
        text = "probe" + secrets.token_hex(8)
        forms: tuple[ContentFormat, ...] = ("string", "parts")
        for form in forms:
            try:
                prompt = self._run([*before, {**message, "content": shaped([text], form)}, *after])
            except InvalidRequest:  # the template rejects this form, or this role
                continue
            printed = any(quote + text + quote in prompt for quote in ("'", '"'))
            if text in prompt and not (form == "parts" and printed):
                return form
        return default


def chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    max_chars: int = MAX_RENDERED,
) -> list[int]:
    """Token ids of a conversation (arguments as in ``ChatTemplate.render``, without tools). A prompt of more
    than ``max_chars`` characters is refused before it is tokenised: InvalidRequest, field ``messages``.

    The template's special tokens are the prompt's; what the tokenizer would add around a plain text is not added,
    except that a tokenizer that starts every text with a BOS gives one here too when the template writes none.
    """
    text = template.render(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        kwargs=kwargs,
    )
    if len(text) > max_chars:
        raise InvalidRequest("messages", f"the prompt has {len(text)} characters, more than {max_chars}")
    ids = tokenizer.encode(text, add_special_tokens=False, field="messages")
    if tokenizer.adds_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def folder_template(folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The chat template of a Hugging Face folder: of ``chat_template.jinja``, ``tokenizer_config.json`` and
    ``chat_template.json`` the first that has one; None when none has."""
    file = folder / "chat_template.jinja"
    stated = file.read_text(encoding="utf-8") if file.is_file() else None
    for name in ("tokenizer_config.json", "chat_template.json"):
        stated = stated or read_json(folder / name).get("chat_template")
    if not stated:
        return None
    if isinstance(stated, str):
        return ChatTemplate(stated, special_tokens=special_tokens)
    try:
        named = {entry["name"]: entry["template"] for entry in stated}
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{folder}: chat_template must be a string or a list of named templates") from error
    if "default" not in named and len(named) > 1:
        raise CheckpointError(f"{folder}: none of the chat templates {', '.join(named)} is the default")
    source = named.get("default") or next(iter(named.values()))
    return ChatTemplate(source, tool_source=named.get("tool_use"), special_tokens=special_tokens)
