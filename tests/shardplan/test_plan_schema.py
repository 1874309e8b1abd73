"""docs/plan.schema.json describes what is written, and docs/plan-format.md names every field."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

from mgtp.shardplan import plan as plan_module
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.writer import write_shards
from tests.shardplan.memory_source import llama_source

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCHEMA = json.loads((DOCS / "plan.schema.json").read_text())
STRUCTS = {
    "": plan_module.ShardPlan,
    "axis": plan_module.AxisPlan,
    "rank": plan_module.RankPlan,
    "tensor": plan_module.TensorPlan,
    "source": plan_module.SourceSlice,
}


@pytest.mark.parametrize(
    "options",
    [
        {"tp_size": 1},
        {"tp_size": 3, "dtype": "bfloat16"},
        {"tp_size": 8, "dtype": "float16"},
        {"tp_size": 3, "shares": (2, 1, 1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True, "vocab_size": 331}])
def test_real_plans_fit_the_schema(tmp_path: Path, options: dict, changes: dict) -> None:
    source = llama_source(**changes)
    write_shards(source, make_plan(source, **options), tmp_path / "out")
    jsonschema.validate(json.loads((tmp_path / "out" / "plan.json").read_text()), SCHEMA)


@pytest.mark.parametrize("name", STRUCTS)
def test_schema_has_exactly_the_fields(name: str) -> None:
    described = SCHEMA["$defs"][name] if name else SCHEMA
    fields = [field.name for field in msgspec.structs.fields(STRUCTS[name])]
    assert sorted(described["properties"]) == sorted(described["required"]) == sorted(fields)
    assert described["additionalProperties"] is False


def test_the_page_names_every_field() -> None:
    page = (DOCS / "plan-format.md").read_text()
    for struct in STRUCTS.values():
        for field in msgspec.structs.fields(struct):
            assert f"`{field.name}`" in page, field.name


def test_a_plan_without_a_field_does_not_fit() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"format_version": 1}, SCHEMA)
