"""OLMo 3: OLMo 2, with windows and rope settings that the cache and the attention take from the config."""

from .olmo2 import build

__all__ = ["build"]
