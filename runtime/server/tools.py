"""Tools: what a conversation offers, which of it must be called, and calls read back from the model's text.

A template that knows tools tells its model how to write a call. The ways that are known here are marked calls
(`<tool_call>{...}</tool_call>`: Hermes, Qwen) and bare JSON (Llama 3, Mistral). Where the way is not known the text
stays text. A call that must be made is made to be bare JSON, by a grammar, whatever the model's own way is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ApiError
from .model import ServedModel
from .protocol import ChatRequest, ToolChoice
from .structured import schema_grammar

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call that the model makes; `arguments` is JSON text."""

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def document(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class PlainReader:
    """Text that holds no calls."""

    num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """What is certain of a further piece of the answer: its text outside of calls, and whole calls."""
        return text, []

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The same of what was held back, the answer being complete."""
        return "", []


class CallReader(PlainReader):
    """What the readers of calls share."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self.num_calls = 0

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls that a JSON text holds: an object or a list of them. None unless all of it is calls."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        found = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        if None in found:
            return []
        calls = [ToolCall(self.num_calls + i, *each) for i, each in enumerate(found) if each is not None]
        self.num_calls += len(calls)
        return calls

    def _call(self, value: Any) -> tuple[str, str] | None:
        """Name and arguments of one call, None when it is none."""
        if not isinstance(value, Mapping) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            return value["name"], arguments
        return value["name"], json.dumps(arguments, ensure_ascii=False)


class MarkedReader(CallReader):
    """Calls between <tool_call> and </tool_call>, text around them."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        out, calls = "", []
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                keep = _beginning(self._held)
                out, self._held = out + self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                return out, calls
            out, self._held = out + self._held[:start], self._held[start:]
            end = self._held.find(_CLOSE)
            if end < 0:
                return out, calls
            whole, self._held = self._held[: end + len(_CLOSE)], self._held[end + len(_CLOSE) :]
            found = self._calls(whole[len(_OPEN) : -len(_CLOSE)])
            calls += found
            out = out.rstrip() if found else out + whole
            if found:
                self._held = self._held.lstrip()

    def finish(self) -> tuple[str, list[ToolCall]]:
        rest, self._held = self._held, ""
        calls = self._calls(rest.removeprefix(_OPEN)) if rest.startswith(_OPEN) else []
        return ("", calls) if calls else (rest, [])


class BareReader(CallReader):
    """An answer that is a call, or a list of calls, and nothing else."""

    _is_text = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        begin = self._held.lstrip()[:1]
        self._is_text = self._is_text or (begin not in ("", "{", "["))
        if not self._is_text:
            return "", []
        out, self._held = self._held, ""
        return out, []

    def finish(self) -> tuple[str, list[ToolCall]]:
        rest, self._held = self._held, ""
        calls = self._calls(rest)
        return ("", calls) if calls else (rest, [])


def _beginning(text: str) -> int:
    """How many characters at the end of `text` could begin a call."""
    return next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)


@dataclass
class ToolUse:
    """The tools of one request: none unless `documents` is set. One of `forced`, where that is set, must be called."""

    documents: list[dict[str, Any]] | None = None
    forced: list[dict[str, Any]] | None = None
    reader_type: type[CallReader] | None = None

    @classmethod
    def of(cls, body: ChatRequest, model: ServedModel) -> ToolUse:
        """What a request says of tools; raises ApiError when it contradicts itself or the template."""
        choice = body.tool_choice
        if not body.tools:
            if choice not in (None, "none"):
                raise ApiError(400, "tool_choice needs tools", param="tool_choice")
            return cls()
        if choice == "none":
            return cls()
        documents = [tool.model_dump(exclude_none=True) for tool in body.tools]
        source = model.template.source(has_tools=True)
        if "tools" not in source:
            raise ApiError(400, "the model's chat template knows no tools", param="tools")
        forced = None
        if isinstance(choice, ToolChoice):
            forced = [document for document in documents if document["function"]["name"] == choice.function.name]
            if not forced:
                raise ApiError(400, "tool_choice names a function that is not in tools", param="tool_choice")
        elif choice == "required":
            forced = documents
        if forced and body.response_format is not None and body.response_format.type != "text":
            raise ApiError(
                400, "response_format and a tool that must be called exclude each other", param="tool_choice"
            )
        return cls(documents, forced, BareReader if forced else _way_of(source))

    async def grammar(self, model: ServedModel) -> str:
        """The grammar of one call of a tool that may be called."""
        schemas = [_call_schema(document["function"]) for document in self.forced or []]
        return await schema_grammar(model, schemas[0] if len(schemas) == 1 else {"anyOf": schemas}, "tools")

    def reader(self) -> PlainReader:
        """A reader for one answer."""
        if self.reader_type is None or self.documents is None:
            return PlainReader()
        return self.reader_type(frozenset(document["function"]["name"] for document in self.documents))


def _way_of(template: str) -> type[CallReader] | None:
    """How a template tells its model to write calls."""
    if _OPEN in template:
        return MarkedReader
    if "[TOOL_CALLS]" in template or "<|python_tag|>" in template or '"parameters"' in template:
        return BareReader
    return None


def _call_schema(function: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a call of one function."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters") or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
