"""Workloads from text and chat files."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint.tokenizer import Tokenizer
from paceline.lab.workload.draft import Draft
from paceline.lab.workload.generator import generator
from paceline.lab.workload.invalid import InvalidWorkload
from paceline.lab.workload.lengths import Lengths
from paceline.lab.workload.vocabulary import Form, in_form

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
}
"""Who speaks, as chat files and ShareGPT say it -> as the OpenAI API says it."""


def text_file(
    path: Path,
    n: int,
    inputs: Lengths,
    outputs: Lengths,
    *,
    tokenizer: Tokenizer | None = None,
    form: Form = "text",
    seed: int = 0,
    run: int = 0,
) -> list[Draft]:
    """Cuts a text into ``n`` prompts that follow each other.

    Args:
        inputs: lengths of the prompts, in tokens; in words where there is no ``tokenizer``.
        form: ``ids`` needs the tokenizer and gives exactly the lengths. The others give the text of these tokens,
            which a server may count differently.
        seed, run: ``seed`` draws the lengths, both together the place in the text where the first prompt starts.

    Raises:
        InvalidWorkload: no such file, or too short.
    """
    assert tokenizer is not None or form != "ids"
    text = _read(path)
    ids = tokenizer.encode(text, add_special_tokens=False) if tokenizer else []
    words = [] if tokenizer else re.findall(r"\S+\s*", text)
    total, unit = (len(ids), "tokens") if tokenizer else (len(words), "words")
    sizes = inputs(n, generator(seed, "input lengths")).tolist()
    if sum(sizes) > total:
        raise InvalidWorkload(f"{path}: has {total} {unit}, but {n} prompts need {sum(sizes)}")
    start = int(generator(seed, "start", run).integers(total - sum(sizes), endpoint=True))
    drafts = []
    for size, output in zip(sizes, outputs(n, generator(seed, "output lengths")).tolist(), strict=True):
        part = slice(start, start + size)
        start += size
        if tokenizer is None:
            drafts.append(Draft(in_form("".join(words[part]).rstrip(), form), output))
        elif form == "ids":
            drafts.append(Draft(ids[part], output, size))
        else:
            drafts.append(Draft(in_form(tokenizer.decode(ids[part], skip_special_tokens=False), form), output))
    return drafts


def chat_file(
    path: Path,
    n: int | None = None,
    *,
    output_tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
    turns: Literal["first", "last", "all"] = "last",
) -> list[Draft]:
    """Conversations as recorded, in the order of the file.

    A file has one JSON object a line, or is one JSON list of them. An object has ``messages`` as in the OpenAI API, or
    ShareGPT's ``conversations`` with ``from`` and ``value``. Objects without a user's message are skipped.

    Args:
        n: how many conversations; None: all.
        output_tokens: asked for; None: as many as the recorded reply has, by the ``tokenizer``.
        turns: which of a conversation's user messages to send, each with all that was recorded before it. With ``all``
            a turn follows the one before at once.

    Raises:
        InvalidWorkload: names the file and the line (in a JSON list: the entry).
    """
    if output_tokens is None and tokenizer is None:
        raise InvalidWorkload("output: is needed without a tokenizer, which would count the recorded replies")
    drafts: list[Draft] = []
    conversations = 0
    for where, entry in _entries(path):
        if n is not None and conversations == n:
            break
        messages = _messages(entry, where)
        ends = [i for i, message in enumerate(messages) if message["role"] == "user"]
        ends = [i for i in ends if i + 1 == len(messages) or messages[i + 1]["role"] != "user"]
        if not ends:
            continue
        conversations += 1
        chosen = {"first": ends[:1], "last": ends[-1:], "all": ends}[turns]
        for turn, end in enumerate(chosen):
            tokens = output_tokens
            if tokens is None:
                assert tokenizer is not None
                reply = messages[end + 1] if end + 1 < len(messages) else {}
                if reply.get("role") != "assistant":
                    raise InvalidWorkload(f"{where}: message {end} has no recorded reply to count; give output")
                tokens = max(1, len(tokenizer.encode(_words(reply["content"]), add_special_tokens=False)))
            drafts.append(Draft(messages[: end + 1], tokens, after=len(drafts) - 1 if turn else None))
    if n is not None and conversations < n:
        raise InvalidWorkload(f"{path}: has {conversations} conversations, but {n} are asked for")
    if not drafts:
        raise InvalidWorkload(f"{path}: holds no conversations")
    return drafts


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidWorkload(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, value) of each entry of a JSONL file or JSON list."""
    text = _read(path)
    if text.lstrip().startswith("["):
        try:
            yield from ((f"{path}: entry {index}", entry) for index, entry in enumerate(json.loads(text)))
        except json.JSONDecodeError as error:
            raise InvalidWorkload(f"{path}:{error.lineno}: no JSON: {error.msg}") from error
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold other line ends as they are
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidWorkload(f"{path}:{number}: no JSON: {error.msg}") from error


def _messages(entry: Any, where: str) -> list[dict[str, Any]]:
    role, content = "role", "content"
    listed = entry.get("messages") if isinstance(entry, dict) else None
    if listed is None and isinstance(entry, dict):
        role, content = "from", "value"
        listed = entry.get("conversations")
    if not isinstance(listed, list):
        raise InvalidWorkload(f"{where}: needs a list named messages or conversations")
    messages = []
    for index, message in enumerate(listed):
        if not isinstance(message, dict) or message.get(role) not in ROLES or content not in message:
            raise InvalidWorkload(
                f"{where}: message {index} needs {content}, and {role} as one of {', '.join(sorted(ROLES))}"
            )
        rest = {key: value for key, value in message.items() if role == "role" and key not in (role, content)}
        messages.append({"role": ROLES[message[role]], "content": message[content], **rest})
    return messages


def _words(content: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""
