"""Granite: Llama, with constants that embedding, row-parallel projections, attention and head take from the config."""

from .llama import build

__all__ = ["build"]
