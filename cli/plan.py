"""`mgtp plan`: what each rank gets."""

from __future__ import annotations

from .app import app


@app.command()
def plan() -> None:
    """Show what each rank gets."""
