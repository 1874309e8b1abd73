"""A rank that holds no model: `python -m mgtp.runtime.probe_rank` measures its device and the collectives, and ends."""

from __future__ import annotations

from .rank import run_rank
from .rank_link import RankLink


def probe(link: RankLink) -> None:
    """Measure, and tell the front."""
    from .collectives.probe import probe_device

    link.send(probe_device(link))


if __name__ == "__main__":
    run_rank(probe)
