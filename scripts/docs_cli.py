"""Writes docs/cli.md: docs/cli.template.md with the commands' own help in the place of its marker.

usage: python scripts/docs_cli.py    (`make docs`)
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
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
    """The program with every command: each module of mgtp.cli registers its own when it is imported."""
    import mgtp.cli
    from mgtp.cli.app import app

    for module in pkgutil.iter_modules(mgtp.cli.__path__):
        if module.name != "__main__":
            importlib.import_module(f"mgtp.cli.{module.name}")
    return app


def render(app: typer.Typer, template: str, name: str = "mgtp") -> str:
    """The page: `template`, its marker replaced by a section for the program and one for every command."""
    # Typer carries a copy of click of its own: everything below goes by the attributes both have.
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name=name)
    sections = [
        _table("Global options, before the command", _rows(group, context)),
        *(_command(group.get_command(context, command), context) for command in group.list_commands(context)),
    ]
    body = "\n\n".join(section for section in sections if section)
    return template.replace(MARKER, body, 1)


def _command(command: Any, parent: Any) -> str:
    if command.hidden:
        return ""
    context = command.context_class(command, info_name=command.name, parent=parent)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    rows = _rows(command, context)
    parts = [
        f"## `{context.command_path}`",
        f"    {usage}",
        _prose(command.help),
        _table("Arguments", [row for row in rows if not row[0].startswith("`-")]),
        _table("Options", [row for row in rows if row[0].startswith("`-")]),
        _prose(command.epilog),
    ]
    return "\n\n".join(part for part in parts if part)


def _rows(command: Any, context: Any) -> list[tuple[str, str]]:
    """(spelling, help) of every parameter that --help shows; ranges, defaults and `required` are part of the help."""
    records = (parameter.get_help_record(context) for parameter in command.get_params(context))
    return [(f"`{names}`", _cell(text)) for names, text in filter(None, records)]


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {_cell(names)} | {text} |" for names, text in rows]
    return "\n".join([f"| {title} | |", "|---|---|", *lines])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _prose(text: str | None) -> str:
    """Help as Markdown: without the marks that tell --help where not to wrap and where to end."""
    return inspect.cleandoc((text or "").split("\f")[0]).replace("\b\n", "").strip()


if __name__ == "__main__":
    main()
