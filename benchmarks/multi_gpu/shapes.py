"""What the parts run: models by their config.json, and how much of each. Small shapes try the script out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Shapes:
    """`tiny`, `medium` and `large` are configs: for exact ids, for one card, for more than one. Counts of tokens."""

    tiny: str
    medium: str
    large: str
    batches: str = "1,8,32,128"
    prompt: int = 512
    output: int = 64
    prefill: str = "1x8000"
    long_prefills: str = "1x8000,1x32000"
    streams: int = 64
    stream_tokens: int = 64
    max_model_len: int = 8192


def llama(folder: Path, name: str, **changes: Any) -> str:
    """A config of a small Llama, written to `folder`; its path."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32, "vocab_size": 4096,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return str(path)


def full_shapes(folder: Path) -> Shapes:
    """What the figures are about."""
    return Shapes(llama(folder, "tiny"), str(BENCHMARKS / "llama_8b.json"), str(BENCHMARKS / "llama_100b.json"))


def small_shapes(folder: Path) -> Shapes:
    """Enough to run every line once, on the CPU too."""
    sizes: dict[str, Any] = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=512,
    )  # fmt: skip
    tiny, medium, large = (llama(folder, name, **sizes) for name in ("tiny", "medium", "large"))
    return Shapes(tiny, medium, large, "1,4", 16, 24, "1x48", "1x48,1x96", 8, 12, 4096)
