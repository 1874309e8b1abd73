"""Writes docs/cli.md: docs/cli.template.md with the commands' own help in the place of its marker.

usage: python scripts/docs_cli.py    (`make docs`)
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEMPLATE = DOCS / "cli.template.md"
PAGE = DOCS / "cli.md"
MARKER = "<!-- commands -->"


def main() -> None:
    PAGE.write_text(render(load_app(), TEMPLATE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}", file=sys.stderr)


def load_app() -> typer.Typer:
    """The program with every command: each module registers its own when it is imported."""
    from mgtp.cli.app import COMMANDS, app

    for name in COMMANDS:
        importlib.import_module(f"mgtp.cli.{name}")
    return app


def render(app: typer.Typer, template: str, name: str = "mgtp") -> str:
    """The page: `template`, its marker replaced by a section for the program and one for every command."""
    # Typer carries a copy of click of its own: everything below goes by the attributes both have.
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name=name, **group.context_settings)
    return template.replace(MARKER, "\n\n".join(_sections(group, context)), 1)


def _sections(command: Any, context: Any) -> Iterator[str]:
    """The section of a command and, when it is a group, those of the commands in it.

    By name: the order of registration depends on what else has been imported.
    """
    yield _section(command, context)
    for _, inner in sorted(getattr(command, "commands", {}).items()):
        if not inner.hidden:
            settings = {"info_name": inner.name, "parent": context, **inner.context_settings}
            yield from _sections(inner, inner.context_class(inner, **settings))


def _section(command: Any, context: Any) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    # (spelling, help) of what --help shows: ranges, defaults and `required` are part of the help already.
    records = (parameter.get_help_record(context) for parameter in command.get_params(context))
    rows = [(names, text) for names, text in filter(None, records)]
    parts = [
        f"## `{context.command_path}`",
        f"    {usage.replace('{', '').replace('}', '')}",
        _prose(command.help),
        _table("Argument", [(names.partition(" <")[0], text) for names, text in rows if not names.startswith("-")]),
        _table("Option", [row for row in rows if row[0].startswith("-")]),
        _prose(command.epilog),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in rows]
    return "\n".join([f"| {title} | |", "|---|---|", *lines])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _prose(text: str | None) -> str:
    """Help as Markdown: without the marks that tell --help where not to wrap and where to end."""
    return inspect.cleandoc((text or "").split("\f")[0]).replace("\b\n", "").strip()


if __name__ == "__main__":
    main()
