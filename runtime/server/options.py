"""How the server behaves: one frozen document, from which the command line takes its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServerOptions:
    """Limits and keys. Seconds and bytes where a unit is needed."""

    api_key: str | None = None
    max_num_seqs: int = 16
    max_queue: int = 1024
    """Sequences that may wait while all of `max_num_seqs` run."""
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    max_restarts: int = 0
    """Most times that failed ranks are started again within restarts.WINDOW_SECONDS."""
    max_n: int = 16
    max_logprobs: int = 20
    max_stop: int = 16
    max_body_bytes: int = 8 << 20
    model_root: Path | None = None
    """With it, /admin/ can change which models are served, to folders below it."""
    verify_on_load: bool = False
    """Whether all weights of a set that is loaded later are hashed first."""
