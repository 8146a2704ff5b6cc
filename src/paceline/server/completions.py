"""Replies of ``/v1/completions``."""

from functools import partial
from typing import Any

from paceline.engine.output import Delta
from paceline.engine.request import Finish
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import TokenLogprobs
from paceline.server.fields import CompletionFields
from paceline.server.logprobs import TextOffsets, TokenTexts, completion_logprobs, prompt_logprobs
from paceline.server.prompts import Prompt
from paceline.server.reply import Reply


class CompletionReply(Reply):
    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, fields: CompletionFields, prompts: list[Prompt], params: SamplingParams, model: str, texts: TokenTexts
    ) -> None:
        super().__init__(prompts, params, model, fields.stream_usage)
        self._fields = fields
        self._texts = texts
        self.text_only = fields.logprobs is None and not fields.return_token_ids
        self._begun: set[tuple[int, int]] = set()
        self._offsets: dict[tuple[int, int], TextOffsets] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._held: dict[int, list[Delta]] = {}

    def chunks(self, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        if not self._echoes_logprobs or prompt in self._prompt_logprobs:
            return super().chunks(prompt, delta)
        # Every candidate echoes the prompt's logprobs, which come with candidate 0.
        held = self._held.setdefault(prompt, [])
        held.append(delta)
        if delta.prompt_logprobs is None:
            return []
        self._prompt_logprobs[prompt] = delta.prompt_logprobs
        del self._held[prompt]
        return [chunk for earlier in held for chunk in super(CompletionReply, self).chunks(prompt, earlier)]

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
        fields, source = self._fields, self.prompts[prompt]
        first = (prompt, candidate) not in self._begun
        self._begun.add((prompt, candidate))
        if prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = prompt_logprobs
        echo = source.text or "" if first and fields.echo else ""
        choice: dict[str, Any] = {
            "index": prompt * self.params.n + candidate,
            "text": echo + text,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": stop,
        }
        if fields.logprobs is not None:
            choice["logprobs"] = self._logprobs(prompt, candidate, ids, logprobs or [], first)
        if whole and fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._whole_prompt_logprobs(prompt, fields.prompt_logprobs)
        if fields.return_token_ids:
            choice["token_ids"] = ids
            if first:
                choice["prompt_token_ids"] = source.ids
        return choice

    @property
    def _echoes_logprobs(self) -> bool:
        return bool(self._fields.echo) and self._fields.logprobs is not None

    def _logprobs(
        self, prompt: int, candidate: int, ids: list[int], entries: list[TokenLogprobs], first: bool
    ) -> dict[str, list[Any]]:
        k = self._fields.logprobs or 0
        if first:
            self._offsets[prompt, candidate] = TextOffsets(self._texts, self.params.skip_special_tokens)
        offsets = self._offsets[prompt, candidate]
        if not (first and self._fields.echo):
            return completion_logprobs(ids, entries, k, self._texts, offsets.next)
        source = self.prompts[prompt]
        text = source.text or ""
        next_offset = partial(offsets.next_of_text, text=text) if source.as_text else offsets.next
        before = completion_logprobs(
            source.ids, [None, *self._prompt_logprobs.get(prompt, [])], k, self._texts, next_offset
        )
        offsets.jump(len(text))
        after = completion_logprobs(ids, entries, k, self._texts, offsets.next)
        return {name: before[name] + after[name] for name in before}

    def _whole_prompt_logprobs(self, prompt: int, k: int) -> list[Any]:
        return prompt_logprobs(self.prompts[prompt].ids, self._prompt_logprobs.get(prompt, []), k, self._texts)
