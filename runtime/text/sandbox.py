"""The jinja environment for chat templates: what transformers offers them, sandboxed, and with limits.

A template is code that came with a checkpoint. The sandbox keeps it away from Python; the limits keep a runaway one
from holding up or filling the process: a deadline that every loop and macro checks, and a cap on repeated text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import datetime
from time import monotonic
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

MAX_RENDER_SECONDS = 10.0
MAX_CHARACTERS = 1 << 25
"""Of one rendered text, and of one repeated string within it."""

_deadline: ContextVar[float] = ContextVar("chat template deadline")


class LimitExceeded(Exception):
    """Rendering took too long or made too much text."""


class ChatEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles chat templates; render them with `render`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda form: datetime.now().strftime(form),
            dict=lambda *args, **kwargs: dict(*args, **kwargs),  # not the type, whose attributes lead into Python
            namespace=Namespace,
        )

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The rendered text; raises LimitExceeded, jinja2.TemplateError or whatever the template's code raises."""
        token = _deadline.set(monotonic() + MAX_RENDER_SECONDS)
        try:
            size, pieces = 0, []
            for piece in template.generate(variables):
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise LimitExceeded(f"it wrote more than {MAX_CHARACTERS} characters")
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _deadline.reset(token)

    def check_deadline(self) -> None:
        """Called by every turn of a loop and every macro call of a template."""
        if monotonic() > _deadline.get():
            raise LimitExceeded(f"it ran for more than {MAX_RENDER_SECONDS:g} seconds")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Multiplication and powers, unless the result would be huge."""
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise LimitExceeded(f"it raised a number to the power {right}")
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, Sequence) and isinstance(count, int) and len(value) * count > MAX_CHARACTERS:
                    raise LimitExceeded(f"it repeated a text {count} times")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """The syntax tree, with a call of `check_deadline` at the start of every loop's and macro's body."""
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro)):
            check = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("check_deadline"), [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(check).set_lineno(node.lineno))
        return tree


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model said, for training; here it is plain text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class Namespace(jinja2.utils.Namespace):
    """A namespace that takes no underscored names: Python itself would look up `__html__` and the like on it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
