"""Writes a shard set of a config.json with the weights that --dummy-weights has: python dummy_set.py CONFIG OUT TP_SIZE"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mgtp.runtime.dummy import random_tensor
from mgtp.runtime.weights import TORCH_DTYPE
from mgtp.shardplan.dtypes import COMMON_NAME, numpy_dtype
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.sources.config_only import ConfigSource, open_config
from mgtp.shardplan.writer import write_shards

if TYPE_CHECKING:
    import numpy as np


class DummySource(ConfigSource):
    """A config's tensors, with random values. The one that is being cut is kept."""

    _held: tuple[str, torch.Tensor] | None = None

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as a fresh array."""
        info = self.tensors[name]
        if self._held is None or self._held[0] != name:
            dtype = TORCH_DTYPE[COMMON_NAME[info.dtype]]
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            self._held = name, random_tensor(name, info.shape, dtype, device).cpu()
        part = self._held[1].view(info.shape[0], -1)[start:stop]
        return part.view(torch.uint8).numpy().copy().view(numpy_dtype(info.dtype))


def main(config: str, out: str, tp_size: str) -> None:
    """Write the set, beside the config itself."""
    plain = open_config(Path(config))
    files = {"config.json": Path(config).read_bytes()}
    source = DummySource(plain.label, plain.config, plain.tensors, files, has_weights=True)
    write_shards(source, make_plan(source, int(tp_size)), Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
