"""Errors as OpenAI's clients expect them: a JSON object with a short message, a type and the parameter's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ...shardplan.errors import MgtpError, UsageError

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is not answered, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def document(self) -> dict[str, Any]:
        """The body of the answer, or of the error event in a stream."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer."""
        content = msgspec.json.encode(self.document())
        return Response(content, self.status, media_type="application/json", headers=self.headers)


def unavailable(message: str, retry_after: int = 5, code: str = "unavailable") -> ApiError:
    """The server cannot take requests now; a client may come back."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """No model of that name."""
    there = ", ".join(map(repr, served)) + (" is" if len(served) == 1 else " are")
    message = f"model {name[:100]!r} is not served, {there}"
    return ApiError(404, message, param="model", code="model_not_found")


class Replaced(ApiError):
    """The model that a request had found is being replaced: it may find the next one."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(503, message, code="replacing", headers={"Retry-After": str(retry_after)})


def usage_error(error: UsageError, param: str | None = None) -> ApiError:
    """A client's mistake that a deeper layer has found, with its hint."""
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    return ApiError(400, message, param=param)


def as_api_error(error: Exception) -> ApiError:
    """Any exception as an answer: what is not a client's mistake says no more than its kind."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return usage_error(error)
    if isinstance(error, MgtpError):
        return ApiError(500, error.message)
    return ApiError(500, f"unexpected {type(error).__name__}")


async def on_error(request: Request, error: Exception) -> Response:
    """FastAPI's handler for everything that an endpoint raises."""
    request.scope.setdefault("mgtp", {})["error"] = error
    return as_api_error(error).response()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Wrong paths and methods, and bodies that are no JSON."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"there is no {request.url.path[:100]!r} here"
    elif error.status_code == 405:
        message = f"{request.method} is not for {request.url.path[:100]!r}"
    else:
        message = "the body could not be read as JSON"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()


async def on_invalid(request: Request, error: Exception) -> Response:
    """Fields of the wrong type or unknown name: the first of them, by name."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["loc"] == ("body",) and not request.headers.get("content-type", "").startswith("application/json"):
        return ApiError(400, "the body must be JSON: send 'Content-Type: application/json'").response()
    return invalid(first).response()


def invalid(first: Mapping[str, Any]) -> ApiError:
    """What pydantic says of the first field that is wrong, as an error that names it."""
    where = [part for part in first["loc"] if part != "body" and not _is_branch(part)]
    name = ".".join(str(part) for part in where)[:100] or None
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON")
    if first["type"] == "extra_forbidden":
        message = f"unknown parameter {name!r}"
    elif first["type"] == "missing":
        message = f"parameter {name!r} is missing" if name else "the body is missing"
    else:
        text = str(first["msg"])[:200]
        message = f"{name}: {text[0].lower()}{text[1:]}" if name else f"the body: {text}"
    return ApiError(400, message, param=name)


def _is_branch(part: Any) -> bool:
    """Whether a part of an error's place names a branch of a union, such as 'list[str]'."""
    return isinstance(part, str) and (part in ("str", "int", "bool", "float") or "[" in part or part[:1].isupper())
