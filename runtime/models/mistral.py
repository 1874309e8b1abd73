"""Mistral: Llama, with a window that the cache and the attention take from the config."""

from .llama import build

__all__ = ["build"]
