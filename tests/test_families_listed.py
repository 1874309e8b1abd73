"""A family is four things that nothing but this test ties together: a name in FAMILIES, its cuts, its forward, its docs."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from mgtp.shardplan.families import FAMILIES, family_module

ROOT = Path(__file__).resolve().parent.parent
SHARED = {"__init__", "common", "decoder"}


def modules(folder: str) -> set[str]:
    """Names of the modules in a folder, without those that families share."""
    return {path.stem for path in (ROOT / folder).glob("*.py")} - SHARED


def documented() -> dict[str, list[str]]:
    """Family -> architectures, from the table in docs/families.md."""
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE)
    return {family: re.findall(r"`(\w+)`", names) for family, names in found}


def test_every_family_has_its_two_modules_and_its_line():
    assert len(set(FAMILIES)) == len(FAMILIES)
    assert modules("shardplan/families") == set(FAMILIES)
    assert modules("runtime/models") == set(FAMILIES)
    assert set(documented()) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_have_what_they_are_asked_for(family):
    module = family_module(family)
    assert callable(module.parse)
    assert callable(module.tensors)
    assert callable(import_module(f"mgtp.runtime.models.{family}").build)
    assert documented()[family] == list(module.ARCHITECTURES)


def test_an_architecture_belongs_to_one_family():
    names = [name for family in FAMILIES for name in family_module(family).ARCHITECTURES]
    assert len(set(names)) == len(names)
