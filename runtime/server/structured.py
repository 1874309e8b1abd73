"""Answers in a given form: from response_format and forced tool calls to a grammar that has been checked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ...shardplan.errors import UsageError
from .errors import ApiError, usage_error
from .model import ServedModel
from .protocol import ResponseFormat


async def read_format(model: ServedModel, form: ResponseFormat | None) -> str | None:
    """The grammar of a response_format, None for plain text."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return await schema_grammar(model, {"type": "object"}, "response_format")
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise ApiError(400, "response_format of type json_schema needs json_schema.schema", param="response_format")
    return await schema_grammar(model, form.json_schema.schema_, "response_format")


async def schema_grammar(model: ServedModel, schema: dict[str, Any], param: str) -> str:
    """The grammar of JSON that a schema accepts; raises ApiError when it cannot be followed."""
    return await asyncio.get_running_loop().run_in_executor(model.threads, _check, model, schema, param)


def _dead_end(model: ServedModel, grammar: str) -> str:
    """What is wrong with a grammar in which nothing but the end can come first: no JSON is that short."""
    from llguidance import LLMatcher

    mask = bytearray(LLMatcher(model.grammar_tokenizer, grammar).compute_bitmask())
    for token_id in model.eos_ids:
        if token_id < 8 * len(mask):
            mask[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
    return "" if any(mask) else "nothing satisfies it"


def _check(model: ServedModel, schema: dict[str, Any], param: str) -> str:
    from llguidance import LLMatcher

    grammar = ""
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        problem = LLMatcher.validate_grammar(grammar, model.grammar_tokenizer) or _dead_end(model, grammar)
    except UsageError as error:
        raise usage_error(error, param) from None
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if problem:
        raise ApiError(400, f"{param}: the schema cannot be followed: {' '.join(problem.split())[:200]}", param=param)
    return grammar
