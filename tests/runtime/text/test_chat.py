"""Chat templates render as transformers renders them, from wherever a checkpoint keeps them, and cannot run away."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from helpers_tokenizers import byte_level_tokenizer, write_tokenizer

from mgtp.runtime.text import sandbox
from mgtp.runtime.text.chat import ChatTemplate
from mgtp.runtime.text.tokenizer import Tokenizer
from mgtp.shardplan.errors import CheckpointError, MgtpError, UsageError
from tests.releases import at_least

USER = [{"role": "user", "content": "Hello <b> & 'you' 中"}]
CHAT = [
    {"role": "system", "content": "  Be brief. "},
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"é": [1, None]}}}]},
    {"role": "tool", "content": "42", "name": None},
    {"role": "assistant", "content": "So: 42", "reasoning": "easy"},
    {"role": "user", "content": [{"type": "text", "text": "part"}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]

TEMPLATES = {
    "tiny": (
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "blocks": (
        "{%- set ns = namespace(n=0, seen=[]) %}\n{{ bos_token }}\n{%- for message in messages %}\n"
        "    {%- if message.role == 'system' %}{% continue %}{% endif %}\n"
        "    {%- if loop.index0 > 4 %}{% break %}{% endif %}\n"
        "    {% set ns.n = ns.n + 1 %}\n"
        "    {%- if message.tool_calls is defined %}\n{{ message.tool_calls | tojson }}\n"
        "    {%- elif 'content' in message %}\n  {{ ns.n }}. {{ message['content'] | trim }}\n    {%- endif %}\n"
        "{%- endfor %}\n{{ pad_token }}{{ unk_token }}|{{ ns.n * 2 }}{{ '-' * 10 }}{{ 2 ** 3 }}\n"
    ),
    "tools": (
        "{% if tools is not none %}{{ tools | tojson(indent=2) }}{{ tools[0] | tojson(sort_keys=true) }}"
        "{% else %}no tools{% endif %}{% for d in documents or [] %}{{ d.title }}{% endfor %}"
        "{{ enable_thinking | default('unset') }}{{ dict(a=1).items() | list }}"
    ),
    "reasoning": (
        "{% set x = 0 %}{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.reasoning_content }}/{{ m.thinking }}"
        "{{ x }}{% endgeneration %}{{ x }}{% endfor %}"
    ),
    "macro": (
        "{% macro show(m, depth=0) %}{{ m.role }}{% if depth < 3 %}{{ show(m, depth + 1) }}{% endif %}{% endmacro %}"
        "{% for m in messages recursive %}{{ show(m) }}{{ loop.cycle('a', 'b') }}{{ loop.last }}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}"
        "{{ messages[::-1][0].role }}{{ '%s-%05d' % ('x', 7) }}{{ 'a,b'.split(',') }}"
    ),
}
SETTINGS = {
    "bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None, "pad_token": "</s>", "add_bos_token": True,
}  # fmt: skip


def template(text: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, special_tokens)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [USER, CHAT], ids=["user", "chat"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_like_transformers(tmp_path: Path, name: str, messages: list, tools: Any, prompt: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    if messages is CHAT and name in ("tiny", "reasoning") and not at_least("transformers", "5.23"):
        pytest.skip("transformers before 5.23 shows templates fields that are null, before 5.21 reasoning by one name")
    reference = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(),
        chat_template=TEMPLATES[name],
        **{key: "</s>" if isinstance(value, dict) else value for key, value in SETTINGS.items() if value is not None},
    )
    write_tokenizer(tmp_path, byte_level_tokenizer(), SETTINGS)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    options = {"tools": tools, "add_generation_prompt": prompt, "enable_thinking": False}
    text = ChatTemplate.load(tmp_path).render(messages, **options)
    assert text == reference.apply_chat_template(messages, tokenize=False, **options)
    ids = Tokenizer.load(tmp_path, {}).encode(text, add_special_tokens=False)
    assert ids == reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def test_bos_comes_once(tmp_path: Path) -> None:
    """A template writes BOS itself; a tokenizer that adds one as well would change the model's answer."""
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATES["tiny"]}
    write_tokenizer(tmp_path, byte_level_tokenizer(bos=True), settings)
    text = ChatTemplate.load(tmp_path).render([{"role": "user", "content": "hi"}])
    assert Tokenizer.load(tmp_path, {}).encode(text, add_special_tokens=False)[:3] == [256, 258, 71]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"chat_template.jinja": "J", "chat_template.json": {"chat_template": "F"}}, "J", "J"),
        ({"chat_template.json": {"chat_template": "F"}, "tokenizer_config.json": {"chat_template": "C"}}, "F", "F"),
        ({"tokenizer_config.json": {"chat_template": "C"}}, "C", "C"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag"}, 3,
                    ]
                }
            },
            "D",
            "T",
        ),
        ({"tokenizer_config.json": {"chat_template": {"default": "D", "tool_use": "T"}}}, "D", "T"),
    ],
)  # fmt: skip
def test_where_templates_are_kept(tmp_path: Path, files: dict[str, Any], plain: str, with_tools: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    loaded = ChatTemplate.load(tmp_path)
    assert loaded.available
    assert loaded.render(USER) == plain
    assert loaded.render(USER, tools=TOOLS) == with_tools


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    loaded = ChatTemplate.load(tmp_path)
    assert not loaded.available
    with pytest.raises(UsageError, match="no chat template"):
        loaded.render(USER)


def test_templates_without_a_default() -> None:
    with pytest.raises(CheckpointError, match="rag, tool_use"):
        ChatTemplate({"rag": "x", "tool_use": "y"}, {}).render(USER)


def test_the_time_is_offered() -> None:
    assert template("{{ strftime_now('%Y') }}").render(USER).startswith("20")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('only user/assistant') }}", "only user/assistant"),
        ("{{ messages[9].content }}", "messages"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% set ns = namespace() %}{% set ns.__html__ = raise_exception %}{{ ns }}", "__html__"),
        ("{{ namespace(_x=1) }}", "_x"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{{ messages[0] | tojson }}{{ missing.field }}", "missing"),
    ],
)
def test_what_a_template_refuses_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        template(text).render(USER)
    assert "\n" not in caught.value.message
    assert "Traceback" not in caught.value.message


@pytest.mark.parametrize(
    "text", ["{% if %}", "{{ x", "{% for m in messages %}", "{{ a | nosuchfilter }}", "{% nosuch %}"]
)
def test_a_broken_template_is_the_checkpoints_fault(text: str) -> None:
    with pytest.raises(CheckpointError, match="default, line 1") as caught:
        template(text).render(USER)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("messages", [[], ["hello"], [None], [[]]])
def test_messages_that_are_none(messages: list) -> None:
    with pytest.raises(UsageError, match="message"):
        template("{{ messages }}").render(messages)


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages }}{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 10 ** 100000 }}",
    ],
)
def test_a_runaway_template_is_stopped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sandbox, "MAX_RENDER_SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(MgtpError, match="stopped") as caught:
        template(text).render(USER)
    assert type(caught.value) is MgtpError
    assert time.monotonic() - start < 5


def test_a_caller_cannot_replace_the_messages() -> None:
    rendered = template("{{ messages | length }}{{ bos_token }}", bos_token="<s>").render(USER, bos_token="B")
    assert rendered == "1B"
