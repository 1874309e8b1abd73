"""What clients may send: OpenAI's parameters, and those that other servers of this kind have added.

Types are strict ("5" is no number), and an unknown parameter is refused by name. Ranges are checked where the values are
used: see SamplingParams and prompts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ],
            "description": "Text, token ids, or a list of either.",
        }
    ),
]
"""Checked by prompts.py: a union would try every branch on every element."""


MAX_MESSAGES, MAX_TOOLS = 16384, 1024
"""Far more than any conversation has; reading a body full of empty ones would hold up all other requests."""


def without_nulls(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a document says: null says nothing, also of what is unknown. Some clients send all that their API has."""
    return {name: value for name, value in document.items() if value is not None}


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return without_nulls(body) if isinstance(body, dict) else body


class StreamOptions(Body):
    """What a stream contains besides the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is obfuscated.")


class JsonSchema(Body):
    """A schema by name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What form the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Body):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="The served model's name; left out, it is taken as read.")
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id -> added to its logit, -100 to 100.")
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = Field(None, description="Add `token_ids` to choices and `prompt_token_ids`.")
    user: str | None = Field(None, description="Accepted, without effect; so are the following.")
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: Prompt = None
    logprobs: int | None = None
    echo: bool | None = None


class Message(BaseModel):
    """One message; fields that are not named here are handed to the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool: always a function."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """A function by name."""

    name: str


class ToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Accepted; the model decides how many calls it makes.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")


class TokenizeRequest(Body):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
