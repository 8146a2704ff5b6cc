"""The fields of each request. Null means the default. What is not supported is refused by name, never ignored."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from paceline.server.errors import invalid

Strings = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
]
Ids = Annotated[list[int], Field(fail_fast=True)]
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})]

MAX_BIASES = 1024


def _bounded_biases(value: Any) -> Any:
    # Before pydantic looks at the entries: it would list every bad one.
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries; the most is {MAX_BIASES}")
    return value


NOT_YET: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that other servers know, each with the values that ask for nothing beyond what happens anyway."""


StreamUsage = Literal["never", "final", "continuous"]
"""``final``: in a last chunk; ``continuous``: also in every chunk, what has been generated so far."""


class Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def refuse_unsupported(self) -> None:
        """Raises a 400 for the first field that this endpoint does not act on."""
        for name, value in (self.model_extra or {}).items():
            if value is None:
                continue
            if name not in NOT_YET:
                raise invalid(name, "is not a field of this endpoint")
            if not any(type(value) is type(default) and value == default for default in NOT_YET[name]):
                raise invalid(name, "is not supported by this server")


class SamplingFields(Fields):
    """What completions and chat have in common."""

    same_name: ClassVar[tuple[str, ...]] = (
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "prompt_logprobs",
    )
    """Fields handed to `SamplingParams` as they are."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_bounded_biases)] = None
    allowed_token_ids: Ids | None = None
    seed: int | None = None
    stop: Strings = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    """A label of the caller's, for the caller's own logs. It changes nothing."""

    @property
    def stream_usage(self) -> StreamUsage:
        """When a stream tells its usage. Raises a 400 for options that do not fit."""
        options = {name: value for name, value in (self.stream_options or {}).items() if value is not None}
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "needs stream=true")
        include = options.pop("include_usage", False)
        if not isinstance(include, bool):
            raise invalid("stream_options.include_usage", "must be true or false")
        if options.pop("include_obfuscation", False) is not False:
            raise invalid("stream_options.include_obfuscation", "is not supported by this server")
        continuous = options.pop("continuous_usage_stats", False)
        if not isinstance(continuous, bool):
            raise invalid("stream_options.continuous_usage_stats", "must be true or false")
        if options:
            raise invalid(f"stream_options.{next(iter(options))}", "is not a stream option")
        if continuous and not include:
            raise invalid("stream_options.continuous_usage_stats", "needs include_usage")
        return "continuous" if continuous else "final" if include else "never"


class CompletionFields(SamplingFields):
    prompt: Prompts = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatFields(SamplingFields):
    messages: Messages = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeFields(Fields):
    """Either ``prompt`` (with ``add_special_tokens``) or ``messages`` (with the template's fields)."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    model: str | None = None
    tokens: Ids | None = None
