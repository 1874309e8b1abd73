"""Options and shard sets of a command that runs on several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..shardplan.errors import UsageError

if TYPE_CHECKING:
    from ..runtime.launch.cluster import Cluster
    from ..shardplan.shard_set import ShardSet


def refuse_for_nodes(**given: object) -> None:
    """Raise UsageError for an option that works on one node only; `given` are options by name."""
    for name, value in given.items():
        if value:
            raise UsageError(f"--{name.replace('_', '-')} does not go with --nnodes", "leave it out, or use one node")


def open_node_set(
    directory: str, tp_size: int | None, nnodes: int, node_rank: int | None, rendezvous: str | None
) -> tuple[ShardSet, Cluster]:
    """The set with the files of this node's ranks, and the cluster. Other ranks' files need not be there."""
    from ..runtime.launch.cluster import parse_cluster
    from ..shardplan.shard_set import ShardSet

    plan = ShardSet.open(Path(directory), tp_size=tp_size, ranks=()).plan
    cluster = parse_cluster(nnodes, node_rank, rendezvous, plan.tp_size)
    ranks = cluster.ranks_of(cluster.node, plan.tp_size)
    return ShardSet.open(Path(directory), tp_size=tp_size, ranks=ranks), cluster
