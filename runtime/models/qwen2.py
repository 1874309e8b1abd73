"""Qwen2: Llama, with biases on q, k and v that the projections take from the file."""

from .llama import build

__all__ = ["build"]
