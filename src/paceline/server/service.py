"""From a request's fields to a reply, and the state that all requests share."""

import asyncio
import time
from typing import Any

from fastapi import Response
from starlette.types import Receive

from paceline.async_llm import AsyncLLM
from paceline.engine.sampling_params import SamplingParams
from paceline.ipc.stream import Receiver
from paceline.server.admission import Admission, Ticket
from paceline.server.chat import ChatReply
from paceline.server.completions import CompletionReply
from paceline.server.config import ServerConfig
from paceline.server.errors import ApiError, invalid, unavailable
from paceline.server.fields import ChatFields, CompletionFields, DetokenizeFields, SamplingFields, TokenizeFields
from paceline.server.generation import Generation
from paceline.server.logprobs import TokenTexts
from paceline.server.metrics import Metrics
from paceline.server.prompts import Conversation, Prompt, PromptEncoder, parse_conversation, parse_prompts
from paceline.server.reply import Reply
from paceline.server.respond import EventStream, whole_reply
from paceline.server.sampling import chat_params, check_min_tokens, check_routing, completion_params, limit_names

DRAINING = "the server is shutting down"


class Service:
    """One model behind HTTP. The engine must have started.

    Attributes:
        names: under which the model is asked for; the first one is reported.
        created: Unix time of the start.
        draining: set once the server goes down: new work is refused.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig, metrics: Metrics) -> None:
        self.llm = llm
        self.config = config
        self.names = config.served_model_names or (llm.config.model,)
        self.created = int(time.time())
        self.draining = False
        self.metrics = metrics
        self._defaults: dict[str, Any] = dict(llm.generation.sampling) if config.generation_defaults else {}
        self._admission = Admission(config, metrics)
        self._encoder = PromptEncoder(
            llm.tokenizer,
            llm.chat_template,
            llm.limits,
            threads=config.tokenizer_threads,
            max_pending=config.max_waiting,
        )
        self._texts = TokenTexts(llm.tokenizer.backend)
        self._open: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def trouble(self) -> ApiError | None:
        """Why nothing can be served now; None: all is well."""
        if self.draining:
            return unavailable(DRAINING, "shutting_down")
        if self.llm.error is not None:
            return unavailable(f"the engine cannot serve: {self.llm.error}", "engine_unavailable")
        return None

    async def complete(self, fields: CompletionFields, arrival: float, receive: Receive) -> Response:
        self._check(fields)
        params = completion_params(fields, self._defaults, self.config)
        check_min_tokens(params, self.llm.generation.eos_ids)
        prompts = parse_prompts(fields.prompt, self.config.max_prompts)
        ticket = self._admission.enter(len(prompts), params.n)
        try:
            add_special = fields.add_special_tokens is not False
            encoded = await self._encoder.prompts(prompts, params, add_special, bool(fields.echo))
            reply = CompletionReply(fields, encoded, params, self._name(fields.model), self._texts)
            generation = self._generate(fields, encoded, params, ticket, arrival)
        except BaseException:
            ticket.close()
            raise
        return await self._respond(fields, generation, reply, receive)

    async def chat(self, fields: ChatFields, arrival: float, receive: Receive) -> Response:
        self._check(fields)
        params = chat_params(fields, self._defaults, self.config)
        check_min_tokens(params, self.llm.generation.eos_ids)
        conversation = self._conversation(fields)
        ticket = self._admission.enter(1, params.n)
        try:
            prompt = await self._encoder.chat(conversation, params, limit_names(fields))
            reply = ChatReply(fields, prompt, params, self._name(fields.model), self._texts)
            generation = self._generate(fields, [prompt], params, ticket, arrival)
        except BaseException:
            ticket.close()
            raise
        return await self._respond(fields, generation, reply, receive)

    async def tokenize(self, fields: TokenizeFields) -> dict[str, Any]:
        self.check_model(fields.model)
        if fields.prompt is not None and fields.messages is not None:
            raise invalid("messages", "cannot go with prompt")
        if fields.prompt is None and fields.messages is None:
            raise invalid("prompt", "is missing, and so is messages; one of them is needed")
        if fields.prompt is not None:
            ids = await self._encoder.encode(fields.prompt, fields.add_special_tokens is not False)
        elif fields.add_special_tokens is not None:
            raise invalid("add_special_tokens", "goes with prompt; a chat template writes its own special tokens")
        else:
            ids = await self._encoder.encode_chat(self._conversation(fields))
        result: dict[str, Any] = {"count": len(ids), "max_model_len": self.llm.limits.max_model_len, "tokens": ids}
        if fields.return_token_strs:
            result["token_strs"] = await self._encoder.names(ids)
        return result

    async def detokenize(self, fields: DetokenizeFields) -> dict[str, Any]:
        self.check_model(fields.model)
        if fields.tokens is None:
            raise invalid("tokens", "is missing")
        return {"prompt": await self._encoder.decode(fields.tokens)}

    def check_model(self, name: str | None) -> None:
        """Raises a 404 for a model that is not served."""
        if name is not None and name not in self.names:
            message = f"the model {name!r} does not exist; this server has {', '.join(map(repr, self.names))}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def metrics_text(self) -> bytes:
        self.metrics.update(self.llm.stats, self.llm.leaks)
        return self.metrics.text()

    async def drain(self, patience_s: float, hurry: asyncio.Future[None]) -> None:
        """Refuses new work and waits for what is open; after ``patience_s``, or when ``hurry`` is done, ends it with
        an error."""
        self.draining = True
        idle = asyncio.create_task(self._idle.wait())
        either: set[asyncio.Future[Any]] = {idle, hurry}
        await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        for generation in list(self._open):
            generation.fail(unavailable(f"{DRAINING}; the reply is not complete", "shutting_down"))

    def close(self) -> None:
        self._encoder.close()

    def _check(self, fields: SamplingFields) -> None:
        """Everything that needs no look at the prompt."""
        if self.trouble is not None:
            raise self.trouble
        self.check_model(fields.model)
        check_routing(fields)
        for name in ("stop_token_ids", "allowed_token_ids"):
            count, size = len(getattr(fields, name) or ()), self.llm.limits.vocab_size
            if count > size:
                raise invalid(name, f"has {count} ids, more than the vocabulary, {size}")

    def _name(self, asked: str | None) -> str:
        return asked or self.names[0]

    def _conversation(self, fields: ChatFields | TokenizeFields) -> Conversation:
        return parse_conversation(
            fields.messages,
            fields.add_generation_prompt,
            fields.continue_final_message,
            fields.chat_template_kwargs,
            self.config.max_messages,
        )

    def _generate(
        self, fields: SamplingFields, prompts: list[Prompt], params: SamplingParams, ticket: Ticket, arrival: float
    ) -> Generation:
        if self.trouble is not None:  # It may have come while the prompt was tokenised.
            raise self.trouble

        def send(ids: list[int], params: SamplingParams, receiver: Receiver) -> int:
            return self.llm.send(
                ids, params, receiver, priority=fields.priority or 0, cache_salt=fields.cache_salt or ""
            )

        ids = [prompt.ids for prompt in prompts]
        meter = self.metrics.request(arrival, [len(prompt) for prompt in ids], params.n)
        generation = Generation(ids, params, send, self.llm.abort, ticket, meter, self._closed)
        self._open.add(generation)
        self._idle.clear()
        return generation

    async def _respond(
        self, fields: SamplingFields, generation: Generation, reply: Reply, receive: Receive
    ) -> Response:
        if fields.stream:
            return EventStream(generation, reply)
        return await whole_reply(generation, reply, receive)

    def _closed(self, generation: Generation) -> None:
        self._open.discard(generation)
        if not self._open:
            self._idle.set()
