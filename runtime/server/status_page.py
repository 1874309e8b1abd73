"""`/`: a page that shows how the server does, and the figures behind it. It loads nothing from elsewhere."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import Server

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


@cache
def page() -> bytes:
    """The page."""
    return Path(__file__).with_name("status_page.html").read_bytes()


def status(server: Server) -> dict[str, Any]:
    """What the page shows, and `/status` tells."""
    host = server.host
    stats = host.stats
    return {
        "status": server.status,
        "model": host.model.name,
        "time": time.monotonic(),
        "running": stats.running,
        "waiting": stats.waiting,
        "used_blocks": stats.used_blocks,
        "total_blocks": stats.total_blocks,
        "generated_tokens": host.num_generated,
        "restarts": host.restarts.count,
        "ranks": host.look_at_ranks(),
    }
