"""The independent reference: transformers in eager mode, computed once a checkpoint and dtype."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache(maxsize=4)
def load_reference(folder: str, dtype: str = "float32") -> Any:
    """The model in `folder`, in evaluation mode."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        config._experts_implementation = "eager"
    cls = getattr(transformers, (config.architectures or [""])[0])
    return cls.from_pretrained(folder, config=config, attn_implementation="eager", dtype=getattr(torch, dtype)).eval()


@torch.no_grad()
def reference_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    """[T, V] of one pass over the prompt."""
    return model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]


def _one_more(model: Any, token: int, before: Any) -> Any:
    """What `model` makes of one more token; older releases of transformers name its cache otherwise."""
    name = "cache" if "cache" in before else "past_key_values"
    return model(input_ids=torch.tensor([[token]]), use_cache=True, **{name: before[name]})


@torch.no_grad()
def reference_cached_logits(model: Any, prompt: list[int], first: int) -> torch.Tensor:
    """[T - first + 1, V] after `first` tokens at once, then token by token."""
    out = model(input_ids=torch.tensor([prompt[:first]]), use_cache=True)
    rows = [out.logits[0, -1:]]
    for token in prompt[first:]:
        out = _one_more(model, token, out)
        rows.append(out.logits[0])
    return torch.cat(rows)


@torch.no_grad()
def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """`count` greedy ids with the model's own cache."""
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    ids = []
    for _ in range(count):
        ids.append(int(out.logits[0, -1].argmax()))
        out = _one_more(model, ids[-1], out)
    return ids


def recipe_prompt(length: int = 20, vocab: int = 131, seed: int = 1) -> list[int]:
    """A fixed random prompt for a model of tests/recipes.py."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(12, vocab, (length,), generator=generator).tolist()


def max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference."""
    return (a.double() - b.double()).abs().max().item()


def assert_close(ours: torch.Tensor, reference: torch.Tensor, limit: float, what: Path | str) -> None:
    """Fail with the numbers when logits differ by more than `limit`."""
    difference = max_difference(ours, reference)
    assert difference <= limit, f"{what}: logits differ by {difference:.3g}, allowed {limit:.3g}"
