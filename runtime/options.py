"""What the ranks are told when they are started: one frozen document, the same for all."""

from __future__ import annotations

import msgspec

from .cache_layout import DEFAULT_BLOCK_SIZE


class RankOptions(msgspec.Struct, frozen=True):
    """Options of a run on tp_size * cp_size ranks, tp varying fastest.

    `devices` are indices of visible GPUs, one a rank (empty on the CPU). `collective` is as on the command line.
    `enforce_eager` launches every kernel of a step by itself instead of replaying a graph. With `dummy_dtype`,
    `shard_set` is a config.json or its folder, and the weights are random, of that dtype.

    On several nodes, `steps` is where followers get their steps and `rendezvous` where torch.distributed meets; empty:
    in the run's folder. `fingerprint` is the shard set's.

    Seconds: `step_timeout` is how long a step may take; `collective_timeout`, how long a rank waits in a collective
    when nobody ends it, is longer than any stage.
    """

    shard_set: str
    tp_size: int
    device: str
    devices: list[int]
    cp_size: int = 1
    allow_shared_device: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 16
    block_size: int = DEFAULT_BLOCK_SIZE
    max_batch_tokens: int = 2048
    kv_cache_bytes: int | None = None
    step_timeout: float = 600.0
    collective_timeout: float = 1200.0
    collective: str = "auto"
    log_level: str = "info"
    fingerprint: str = ""
    steps: str = ""
    rendezvous: str = ""
    enforce_eager: bool = False
    dummy_dtype: str = ""

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.cp_size
