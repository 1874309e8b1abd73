"""Phi-3: Llama, with projections that are packed in the file and a rotation that the config describes."""

from .llama import build

__all__ = ["build"]
