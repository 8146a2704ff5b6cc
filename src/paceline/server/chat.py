"""Replies of ``/v1/chat/completions``."""

from typing import Any

from paceline.engine.output import RequestOutput
from paceline.engine.request import Finish
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import TokenLogprobs
from paceline.server.fields import ChatFields
from paceline.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from paceline.server.prompts import Prompt
from paceline.server.reply import Reply


class ChatReply(Reply):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, fields: ChatFields, prompt: Prompt, params: SamplingParams, model: str, texts: TokenTexts
    ) -> None:
        super().__init__([prompt], params, model, fields.stream_usage)
        self._fields = fields
        self._texts = texts
        self.text_only = not fields.logprobs and not fields.return_token_ids
        self._begun: set[int] = set()

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        reply = super().whole(outputs)
        ids, entries = self.prompts[0].ids, outputs[0].prompt_logprobs
        if self._fields.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(ids, entries or [], self._fields.prompt_logprobs, self._texts)
        if self._fields.return_token_ids:
            reply["prompt_token_ids"] = ids
        return reply

    def choice(
        self,
        prompt: int,
        candidate: int,
        *,
        text: str,
        ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
        finish: Finish | None,
        stop: str | int | None,
        whole: bool,
    ) -> dict[str, Any]:
        first = candidate not in self._begun
        self._begun.add(candidate)
        message: dict[str, Any] = {"role": "assistant"} if first else {}
        message["content"] = text
        if whole:
            message["refusal"] = None
        choice: dict[str, Any] = {
            "index": candidate,
            "message" if whole else "delta": message,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": stop,
        }
        if self._fields.logprobs:
            choice["logprobs"] = chat_logprobs(ids, logprobs or [], self._fields.top_logprobs or 0, self._texts)
        if self._fields.return_token_ids:
            choice["token_ids"] = ids
            if first and not whole:
                choice["prompt_token_ids"] = self.prompts[prompt].ids
        return choice
