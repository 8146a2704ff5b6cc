"""The bytes of a request."""

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.lab.stage import Prompt, Stage
from paceline.lab.target import Target


class ServerOptions(msgspec.Struct, frozen=True):
    """What a server takes of the fields that OpenAI's own does not have."""

    usage: str = "continuous"
    """``continuous``: with every chunk, ``final``: at the end, ``none``."""
    ignore_eos: bool = True


class RequestMaker(msgspec.Struct, frozen=True):
    """Makes the requests of a stage. Plain data: the workers get one, for requests that need another's reply."""

    host: str
    """As the Host field has it."""
    prefix: str
    """Of the path, before ``/v1``."""
    api_key: str | None
    fields: dict[str, Any]
    """Of every body."""

    @classmethod
    def of(cls, target: Target, stage: Stage, options: ServerOptions, host: str, prefix: str) -> "RequestMaker":
        fields: dict[str, Any] = {"model": target.model, "stream": True, **stage.sampling}
        if options.usage != "none":
            fields["stream_options"] = {"include_usage": True}
        if options.usage == "continuous":
            fields["stream_options"]["continuous_usage_stats"] = True
        if stage.ignore_eos and options.ignore_eos:
            fields["ignore_eos"] = True
        return cls(host, prefix, target.api_key, fields)

    def make(self, prompt: Prompt, output_tokens: int) -> bytes:
        """Header section and body. Messages go to the chat endpoint, text and token ids to the other."""
        chat = is_chat(prompt)
        body = msgspec.json.encode(
            {"messages" if chat else "prompt": prompt, "max_tokens": output_tokens, **self.fields}
        )
        lines = [
            f"POST {self.prefix}/v1/{'chat/' if chat else ''}completions HTTP/1.1",
            f"Host: {self.host}",
            "Accept: text/event-stream",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "User-Agent: paceline-bench",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], dict)


def with_reply(sent: Sequence[Any], earlier: int, reply: str, prompt: Sequence[Any]) -> list[Any]:
    """Messages of the next turn: what was ``sent`` in the turn before, its reply, and those of ``prompt`` that are new.

    Args:
        earlier: number of messages in the prompt of the turn before; ``prompt`` starts with them.
    """
    return [*sent, {"role": "assistant", "content": reply}, *prompt[earlier:]]
