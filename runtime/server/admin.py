"""/admin/: which models are served, changed by whoever has the key."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from ...shardplan.errors import CheckpointError, DeviceError, MgtpError, UsageError
from .changes import Changes
from .errors import ApiError
from .gate import json_response
from .host import ModelHost
from .model_root import resolve
from .protocol import Body


class LoadRequest(Body):
    """The body of /admin/load."""

    path: str = Field(description="A shard set's folder, from the model root on.")
    model: str | None = Field(None, min_length=1, description="The name in requests; default: the folder's.")


class UnloadRequest(Body):
    """The body of /admin/unload."""

    model: str


class ReplaceRequest(Body):
    """The body of /admin/replace."""

    path: str = Field(description="A shard set's folder, from the model root on.")
    model: str | None = Field(None, description="The model whose place it takes; default: the first.")
    in_place: bool = Field(False, description="End the old ranks first, even where there is room for both.")


class ClearCacheRequest(Body):
    """The body of /admin/clear-cache."""

    model: str | None = Field(None, description="Default: every model.")


def admin_router(changes: Changes, root: Path, responses: dict[int | str, dict[str, Any]]) -> APIRouter:
    """The paths below /admin/."""
    router = APIRouter(prefix="/admin")

    @router.post("/load", responses=responses)
    async def load(body: LoadRequest) -> Response:
        """Serve another shard set beside those there are."""
        begin, path = time.monotonic(), resolve(root, body.path)
        try:
            host = await changes.load(body.model or Path(body.path).name, path)
        except MgtpError as error:
            raise _as_answer(error) from None
        return json_response({"model": describe(host), "seconds": _since(begin)})

    @router.post("/unload", responses=responses)
    async def unload(body: UnloadRequest) -> Response:
        """Serve a model no more, once it has finished what it is doing."""
        num_cut = await changes.unload(body.model)
        return json_response({"model": body.model, "sequences_cut": num_cut})

    @router.post("/replace", responses=responses)
    async def replace(body: ReplaceRequest) -> Response:
        """Serve another shard set under a model's name."""
        begin, path = time.monotonic(), resolve(root, body.path)
        try:
            host, how = await changes.replace(body.model, path, in_place=body.in_place)
        except MgtpError as error:
            raise _as_answer(error) from None
        return json_response({"model": describe(host), "how": how, "seconds": _since(begin)})

    @router.post("/clear-cache", responses=responses)
    async def clear_cache(body: ClearCacheRequest) -> Response:
        """Forget what prompts have begun with: requests from now on compute it again."""
        return json_response({"models": changes.clear_cache(body.model)})

    return router


def describe(host: ModelHost) -> dict[str, Any]:
    """A model as /v1/models lists it."""
    model = host.model
    length = model.ready[0].max_model_len if model.ready else None
    fixed = {"id": model.name, "object": "model", "created": model.created, "owned_by": "mgtp"}
    return {**fixed, "max_model_len": length}


def _as_answer(error: MgtpError) -> ApiError:
    """Why a set is not served: 400 for the set itself, 409 when it does not fit, 500 when its ranks failed."""
    status = 400 if isinstance(error, CheckpointError | UsageError) else 409 if isinstance(error, DeviceError) else 500
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    return ApiError(status, message, param="path" if status == 400 else None)


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 3)
