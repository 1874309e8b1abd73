"""How a rank leaves the others when all is done: NCCL waits for every graph that has recorded a collective of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mgtp.runtime.graphs import DecodeGraphs
from mgtp.runtime.paged_steps import PagedSteps
from mgtp.runtime.rank_worker import RankWorker
from mgtp.runtime.runner import Runner


def test_graphs_go_before_the_groups_that_they_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    gone: list[str] = []

    def made(cls: Any, **attributes: Any) -> Any:
        thing = cls.__new__(cls)
        vars(thing).update(attributes)
        return thing

    stand_ins = {size: (SimpleNamespace(reset=lambda: gone.append("graph")), None) for size in (1, 2)}
    steps = made(PagedSteps, graphs=made(DecodeGraphs, _graphs=stand_ins))
    groups = SimpleNamespace(close=lambda: gone.append("groups"))
    made(RankWorker, runner=made(Runner, paged_steps=steps), mesh=groups).end()
    assert gone == ["graph", "graph", "groups"]
    assert steps.graphs is None
