"""The documents are true: docs/cli.md is what the commands say, and links, commands, options and targets exist."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from docs_cli import MARKER, PAGE, TEMPLATE, load_app, render

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
GUIDES = [path for path in DOCUMENTS if "decisions" not in path.parts and path.name != "CHANGELOG.md"]


def document_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def spellings(command: Any) -> set[str]:
    """Of the options of a command and, for a group, of those of the commands in it."""
    inner = getattr(command, "commands", {}).values()
    return {opt for p in command.params for opt in p.opts}.union({"-h", "--help"}, *map(spellings, inner))


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """Command -> spellings of its options."""
    group: Any = typer.main.get_command(load_app())
    return {name: spellings(command) for name, command in group.commands.items()}


# --- docs/cli.md ------------------------------------------------------------------------------------------------------


def test_cli_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(load_app(), TEMPLATE.read_text(encoding="utf-8")), (
        "run: make docs"
    )


def test_every_option_has_help() -> None:
    rows = re.findall(r"^\| `-.*$", render(load_app(), TEMPLATE.read_text(encoding="utf-8")), re.MULTILINE)
    assert rows
    assert not [row for row in rows if re.search(r"\| (\[.*)?\|$", row)]


def test_render_shows_arguments_options_defaults_and_ranges() -> None:
    program = typer.Typer(rich_markup_mode=None, add_completion=False)

    @program.callback()
    def _globals(debug: Annotated[bool, typer.Option("--debug", help="Say more.")] = False) -> None: ...

    @program.command("cut-up", epilog="Exits with 1 | 2.")
    def _cut_up(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="A | B.")],
        size: Annotated[int, typer.Option(min=1, help="How many.")] = 2,
    ) -> None:
        """Cut it up.\n\nSlowly."""

    @program.command(hidden=True)
    def _secret() -> None: ...

    store = typer.Typer(help="What is stored.")
    program.add_typer(store, name="store")

    @store.command("list")
    def _list() -> None: ...

    page = render(program, f"# Top\n\n{MARKER}\n\nend\n", name="prog")
    assert "| `--debug` | Say more. |" in page
    assert "## `prog cut-up`\n\n    prog cut-up [OPTIONS] MODEL\n" in page
    assert "Cut it up.\n\nSlowly.\n" in page
    assert "| `MODEL` | A \\| B. [required] |" in page
    assert re.search(r"\| `--size <int.*>` \| How many\. \[default: 2; x>=1\] \|", page)
    assert "\n\nExits with 1 | 2.\n\n## `prog store`\n" in page
    assert "## `prog store list`\n\n    prog store list" in page
    assert page.endswith("\n\nend\n")
    assert "secret" not in page


# --- all documents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=document_id)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", path.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing


def code_in(text: str) -> Iterator[str]:
    """Everything that a document sets as code: fenced and indented lines, and inline spans."""
    outside = []
    is_fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            yield line.strip()
        else:
            outside.append(line)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", "\n".join(outside)))


@pytest.mark.parametrize("path", GUIDES, ids=document_id)
def test_commands_and_options_exist(path: Path, options: dict[str, set[str]]) -> None:
    wrong = []
    for code in code_in(path.read_text(encoding="utf-8")):
        call = re.match(r"(?:\$ )?(?:\S*/)?mgtp ([a-z][a-z-]*)\b(.*)", code)
        if not call:
            continue
        known = options.get(call[1])
        used = re.findall(r"(?<!\S)-{1,2}[a-z][a-z-]*", call[2])
        if known is None or not set(used) <= known:
            wrong.append(code)
    assert not wrong


@pytest.mark.parametrize("path", GUIDES, ids=document_id)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = {m[1] for code in code_in(path.read_text(encoding="utf-8")) if (m := re.match(r"make ([a-z]+)", code))}
    assert used <= targets


def test_readme_names_every_family() -> None:
    from mgtp.shardplan.families import FAMILIES

    row = re.search(r"^\| families \| (.*) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert row
    assert re.findall(r"[a-z]\w*", row[1]) == sorted(FAMILIES)


def test_every_decision_is_listed_by_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    rows = re.findall(
        r"^\| \[\d{4}\]\((.+?)\) \| (.+) \| \w+ \|$", (folder / "README.md").read_text(encoding="utf-8"), re.M
    )
    titles = {path.name: path.read_text(encoding="utf-8").splitlines()[0] for path in folder.glob("[0-9]*.md")}
    assert {name: f"# {name[:4]}: {title}" for name, title in rows} == titles


def test_the_program_loads_every_command() -> None:
    """Guards against a command module that `main` does not import: the command would not be there."""
    import mgtp.cli
    from mgtp.cli.app import COMMANDS

    for module in pkgutil.iter_modules(mgtp.cli.__path__):
        if module.name != "__main__":
            importlib.import_module(f"mgtp.cli.{module.name}")
    group: Any = typer.main.get_command(load_app())
    assert set(group.commands) == {name.replace("_", "-") for name in COMMANDS}
