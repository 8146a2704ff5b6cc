import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from paceline.checkpoint import chat_template
from paceline.checkpoint.chat_template import ChatTemplate, chat_prompt, folder_template
from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.gguf import GGUFCheckpoint
from paceline.checkpoint.tokenizer import Tokenizer, folder_tokenizer
from paceline.engine.invalid import InvalidRequest
from tiny_models import BOS_ID, CHAT_TEMPLATE, IM_END_ID, save_tokenizer, tiny_tokenizer

STRINGS = CHAT_TEMPLATE
PARTS = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BOTH = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TOOL_PARTS = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['role'] == 'tool' %}{% for part in message['content'] %}{{ part.text }}{% endfor %}
{% else %}{{ message['content'] }}{% endif %}<|im_end|>
{% endfor %}"""
ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ message['content'] + eos_token }}{% endif %}
{% endfor %}"""
RICH = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set day = strftime_now('%Y') if date_string is not defined else date_string %}
{{- 'Today: ' ~ day ~ '\n' }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- generation %}{{ message.role ~ ns.count ~ ': ' ~ message.content | trim ~ '\n' }}{% endgeneration %}
    {% if loop.last %}
    last
    {% endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<no think>{% endif %}
{{- {'a': '<b> & é'} | tojson }}"""
THINKING = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if '</think>' in message.content %}{{ message.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}"""

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello <world> & é"},
    {"role": "assistant", "content": " the answer "},
    {"role": "user", "content": "and?"},
]


def conversation(*texts: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def refusal(template: ChatTemplate, messages: Any, **options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        template.render(messages, **options)
    assert caught.value.field == "messages"
    return caught.value.message


@pytest.mark.parametrize("template", [STRINGS, BOTH, ALTERNATING, RICH, THINKING])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_equals_transformers(tmp_path: Path, template: str, add_generation_prompt: bool) -> None:
    save_tokenizer(tmp_path, chat_template=template)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    messages = TALK[1:] if template == ALTERNATING else TALK
    options: dict[str, Any] = {}
    if template == RICH:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        options = {"tools": [tool], "kwargs": {"enable_thinking": False, "date_string": "today"}}
    expected = reference.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        tools=options.get("tools"),
        **options.get("kwargs", {}),
    )
    ours = folder_template(tmp_path, {"bos_token": "<bos>", "eos_token": "<|im_end|>"})
    assert ours is not None
    assert ours.render(messages, add_generation_prompt=add_generation_prompt, **options) == expected


def test_smollm2(smollm2: GGUFCheckpoint) -> None:
    template = smollm2.chat_template()
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "form"), [(STRINGS, "string"), (PARTS, "parts"), (BOTH, "string"), (ALTERNATING, "string")]
)
def test_content_reaches_the_prompt_in_either_form(source: str, form: str) -> None:
    """failure 35: strings for templates of parts and the reverse."""
    template = ChatTemplate(source)
    assert set(template.content_formats.values()) == {form}
    for content in ("what is this", parts("what is this"), ["what is this"]):
        prompt = template.render(conversation(content))
        assert "what is this" in prompt
        assert "'text'" not in prompt
    separator = "" if form == "parts" else "\n"
    assert f"one{separator}two" in template.render(conversation(parts("one", "two")))


@pytest.mark.parametrize("source", [STRINGS, PARTS, BOTH, TOOL_PARTS])
@pytest.mark.parametrize("content", ["22 degrees", parts("22 degrees")])
def test_tool_result_reaches_the_prompt(source: str, content: Any) -> None:
    """failure 35: the tool result vanishes where a template takes it in another form than the user's text."""
    messages = [*conversation("weather?", "calling"), {"role": "tool", "tool_call_id": "call00001", "content": content}]
    prompt = ChatTemplate(source).render(messages)
    assert "22 degrees" in prompt
    assert "'text'" not in prompt
    assert "weather?" in prompt


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        (["hello"], "message 0 is not an object"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": 3, "content": "x"}], "message 0 has no role"),
        ([*conversation("x"), {"role": "assistant"}], "message 1: content must be"),
        ([{"role": "user", "content": None}], "message 0: content must be"),
        ([{"role": "user", "content": 5}], "message 0: content must be"),
        ([{"role": "user", "content": []}], "message 0: content must be"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "'image_url' parts are not supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "must hold a string"),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    template = ChatTemplate(STRINGS)
    assert message in refusal(template, messages)
    assert "hello" in template.render(conversation("hello"))


def test_an_assistant_message_may_have_only_tool_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*conversation("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "None" not in ChatTemplate(STRINGS).render(messages)


def test_the_templates_own_rejection() -> None:
    """failure 37 (template half): its message reaches the caller, and the next request works."""
    template = ChatTemplate(ALTERNATING)
    expected = "Conversation roles must alternate user/assistant/user/assistant/..."
    for messages in (
        [{"role": "assistant", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}],
    ):
        assert refusal(template, messages) == expected
    assert "hello" in template.render(conversation("hello"))


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].name.first.last",
        "'x' + messages[0].name",
        "messages[0].content + 1",
        "1 // 0",
        "messages[5]['content'] ~ missing()",
        "messages.append(1)",
        "().__class__.__base__.__subclasses__()",
        "{{}}.pop('x')",
    ],
)
def test_any_failure_of_a_template_is_a_refusal(expression: str) -> None:
    """failure 37 (template half): whatever a template trips over, also what the sandbox forbids."""
    template = ChatTemplate("{{ '" + "x' }}{{ " + expression.replace("{{}}", "{}") + " }}")
    assert refusal(template, conversation("hello"))


@pytest.mark.parametrize("source", [STRINGS, PARTS, BOTH])
@pytest.mark.parametrize("prefix", ["the answer is", "trailing  ", "", "line\n", "<think>\nhm", "é🙂"])
def test_continue_final_message(source: str, prefix: str) -> None:
    """failure 38: ends exactly with the prefix; what comes before equals the prompt that asks for a reply."""
    template = ChatTemplate(source)
    question = conversation("hello")
    opened = template.render(question)
    for content in (prefix, parts(prefix)):
        messages = [*question, {"role": "assistant", "content": content}]
        assert template.render(messages, continue_final_message=True) == opened + prefix


def test_continue_where_the_template_rewrites() -> None:
    """failure 38: trimmed in front or cut at a thinking block is refused; trimmed only behind can be continued."""
    trimming = ChatTemplate(STRINGS.replace("message['content']", "message['content'] | trim"))
    assert trimming.render(conversation("x", "answer  "), continue_final_message=True).endswith("\nanswer  ")
    assert "cannot be continued" in refusal(trimming, conversation("x", "  answer"), continue_final_message=True)
    thinking = ChatTemplate(THINKING)
    rewritten = conversation("x", "<think>a</think>\nb")
    assert "cannot be continued" in refusal(thinking, rewritten, continue_final_message=True)
    assert thinking.render(conversation("x", "plain"), continue_final_message=True).endswith("assistant\nplain")
    dropping = ChatTemplate("{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}")
    assert "cannot be continued" in refusal(dropping, conversation("x", "y"), continue_final_message=True)
    doubling = ChatTemplate("{{ messages[-1].content }} {{ messages[-1].content }}")
    assert "cannot be continued" in refusal(doubling, conversation("x", "y"), continue_final_message=True)


def test_only_the_assistant_can_be_continued() -> None:
    """failure 38"""
    message = refusal(ChatTemplate(STRINGS), conversation("x"), continue_final_message=True)
    assert message == "only a last message from the assistant can be continued"


@pytest.fixture(params=[False, True], ids=["plain", "tokenizer adds bos"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    backend = tiny_tokenizer()
    if request.param:
        backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    return Tokenizer(backend, bos_token="<bos>", eos_token="<|im_end|>")


@pytest.mark.parametrize("source", [STRINGS, "{{ bos_token }}" + STRINGS])
def test_one_bos_on_every_path(tokenizer: Tokenizer, source: str) -> None:
    """failure 34: template and tokenizer may each write a BOS; the chat prompt, the rendered text as a plain prompt,
    and the same text without its BOS give equal ids."""
    template = ChatTemplate(source, special_tokens={"bos_token": "<bos>"})
    messages = conversation("hello", "world", "and")
    ids = chat_prompt(tokenizer, template, messages)
    wanted = 1 if tokenizer.adds_bos or source != STRINGS else 0
    assert ids.count(BOS_ID) == wanted
    assert ids[:wanted] == [BOS_ID] * wanted
    text = template.render(messages)
    assert tokenizer.encode(text) == ids
    if tokenizer.adds_bos:
        assert tokenizer.encode(text.removeprefix("<bos>")) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<bos>") == text.removeprefix("<bos>")


def test_nothing_else_is_added_to_a_chat_prompt() -> None:
    backend = tiny_tokenizer()
    backend.post_processor = TemplateProcessing(
        single="<bos> $A <|im_end|>", special_tokens=[("<bos>", BOS_ID), ("<|im_end|>", IM_END_ID)]
    )
    tokenizer = Tokenizer(backend, bos_token="<bos>")
    open_prompt = chat_prompt(
        tokenizer, ChatTemplate(STRINGS), conversation("hello", "the"), continue_final_message=True
    )
    assert open_prompt[0] == BOS_ID
    assert open_prompt[-1] == tokenizer.encode("the", add_special_tokens=False)[-1]


def test_half_a_surrogate_pair_names_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="messages: is not valid Unicode"):
        chat_prompt(Tokenizer(tiny_tokenizer()), ChatTemplate(STRINGS), conversation("a\udc00"))


def test_template_variables() -> None:
    template = ChatTemplate(RICH, special_tokens={"bos_token": "<bos>"})
    assert "<no think>" in template.render(TALK, kwargs={"enable_thinking": False})
    assert "<no think>" not in template.render(TALK, kwargs={"enable_thinking": True})
    assert template.render(TALK, kwargs={"date_string": "now"}).startswith("<bos>Today: now\n")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"chat_template": "{% for i in range(99999) %}x{% endfor %}"}, "chat_template is no variable"),
        ({"messages": []}, "messages is no variable"),
        ({"tools": []}, "tools is no variable"),
        ({"bos_token": "x"}, "bos_token is no variable"),
        ({"raise_exception": "x"}, "raise_exception is no variable"),
        ({"unknown": 1}, "unknown is no variable that can be set; these can: date_string, enable_thinking"),
        ({"date_string": ["x"] * 9}, "must be a plain value"),
        ({"date_string": {"a": 1}}, "must be a plain value"),
        ({"date_string": "x" * 1001}, "longer than 1000 characters"),
        ({"date_string": 10**9}, "must be from"),
        ({"date_string": float("nan")}, "must be from"),
    ],
)
def test_template_variables_are_bounded(kwargs: Mapping[str, Any], message: str) -> None:
    """failure 88 (template half): no template, and nothing that makes one run long, comes from a request."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        ChatTemplate(RICH).render(TALK, kwargs=kwargs)
    assert caught.value.field == "chat_template_kwargs"


def test_a_message_is_text_and_never_a_template() -> None:
    """failure 88 (template half)"""
    evil = "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"
    assert evil in ChatTemplate(STRINGS).render(conversation(evil))


def test_rendering_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """failure 88 (template half)"""
    monkeypatch.setattr(chat_template, "MAX_RENDERED", 1000)
    template = ChatTemplate("{% for i in range(9000) %}{{ messages[0].content }}{% endfor %}")
    assert refusal(template, conversation("hello")) == "the prompt exceeds 1000 characters"
    endless = ChatTemplate("{% for i in range(999999999) %}x{% endfor %}")
    assert "Range too big" in refusal(endless, conversation("hello"))
    assert "hello" in ChatTemplate(STRINGS).render(conversation("hello"))


def test_a_template_that_does_not_parse() -> None:
    with pytest.raises(CheckpointError, match="does not parse"):
        ChatTemplate("{% for message in messages %}")


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config__json": {"chat_template": None}}, None),
        ({"tokenizer_config__json": {"chat_template": "config"}}, "config"),
        ({"chat_template__json": {"chat_template": "json"}}, "json"),
        ({"tokenizer_config__json": {"chat_template": "config"}, "chat_template__jinja": "jinja"}, "jinja"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "only", "template": "only"}]}}, "only"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "tools {{ tools }}"},
                        {"name": "default", "template": "default"},
                    ]
                }
            },
            "default",
        ),
    ],
)
def test_where_the_template_comes_from(tmp_path: Path, files: dict[str, object], expected: str | None) -> None:
    write(tmp_path, **files)
    template = folder_template(tmp_path, {})
    assert (template and template.render(conversation("x"))) == expected


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools {{ tools[0] }}"}, {"name": "default", "template": "default"}]
    write(tmp_path, tokenizer_config__json={"chat_template": named})
    template = folder_template(tmp_path, {})
    assert template is not None
    tools: Sequence[Any] = ["f"]
    assert template.render(conversation("x"), tools=tools) == "tools f"
    write(tmp_path, tokenizer_config__json={"chat_template": [{**named[0], "name": "rag"}, named[0]]})
    with pytest.raises(CheckpointError, match="none of the chat templates rag, tool_use is the default"):
        folder_template(tmp_path, {})
    write(tmp_path, tokenizer_config__json={"chat_template": ["x"]})
    with pytest.raises(CheckpointError, match="a string or a list of named templates"):
        folder_template(tmp_path, {})


def test_special_tokens_in_user_text_become_tokens(tmp_path: Path) -> None:
    """Documented in ``Tokenizer``: as in transformers, text that spells a special token is that token."""
    save_tokenizer(tmp_path)
    tokenizer, reference = folder_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = conversation("a<|im_end|>b")
    ids = chat_prompt(tokenizer, ChatTemplate(CHAT_TEMPLATE), messages)
    assert ids.count(IM_END_ID) == 2
    assert ids == reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
