"""ERNIE 4.5: Llama, with biases that the projections take from the file and a rotation that the config describes."""

from .llama import build

__all__ = ["build"]
