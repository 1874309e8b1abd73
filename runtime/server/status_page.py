"""`/`: a page that shows how the server does, and the figures behind it. It loads nothing from elsewhere."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import Server
    from .host import ModelHost

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}

_SUMS = ("running", "waiting", "used_blocks", "total_blocks", "generated_tokens", "restarts")


@cache
def page() -> bytes:
    """The page."""
    return Path(__file__).with_name("status_page.html").read_bytes()


def status(server: Server) -> dict[str, Any]:
    """What the page shows, and `/status` tells: figures of all models together, and of each."""
    models = [_model(host) for host in server.models]
    return {
        "status": server.status,
        "model": models[0]["name"] if models else None,
        "time": time.monotonic(),
        **{name: sum(model[name] for model in models) for name in _SUMS},
        "ranks": [{**rank, "model": model["name"]} for model in models for rank in model["ranks"]],
        "models": models,
    }


def _model(host: ModelHost) -> dict[str, Any]:
    stats = host.stats
    return {
        "name": host.name,
        "status": host.status,
        "running": stats.running,
        "waiting": stats.waiting,
        "used_blocks": stats.used_blocks,
        "total_blocks": stats.total_blocks,
        "generated_tokens": host.num_generated,
        "restarts": host.restarts.count,
        "ranks": host.look_at_ranks(),
    }
