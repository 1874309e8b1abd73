"""The mesh: which sizes make one, and that it uses and leaves alone what was there before it.

Guards against meshes that are not rectangular, ranks that are left out of one without a word, groups that outlive their
mesh, and a default group destroyed under its owner.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mgtp.runtime.communicator import Communicator
from mgtp.runtime.mesh import create_mesh
from mgtp.runtime.mesh_sizes import mesh_sizes
from mgtp.shardplan.errors import UsageError


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "asked", "expected"),
    [
        (8, 8, (None, None), (8, 1)),
        (8, 2, (None, None), (2, 4)),
        (8, 3, (None, None), (2, 4)),
        (6, 4, (None, None), (3, 2)),
        (7, 4, (None, None), (1, 7)),
        (8, 1, (None, None), (1, 8)),
        (8, 2, (8, None), (8, 1)),
        (8, 8, (None, 4), (2, 4)),
        (8, 8, (2, 4), (2, 4)),
        (1, 8, (None, None), (1, 1)),
    ],
)
def test_sizes(ranks, kv_heads, asked, expected):
    assert mesh_sizes(ranks, kv_heads, *asked) == dict(zip(("tp", "cp"), expected, strict=True))


@pytest.mark.parametrize(
    ("ranks", "asked", "message"),
    [
        (8, (3, None), "--tp-size 3 does not divide 8 ranks"),
        (6, (None, 4), "--cp-size 4 does not divide 6 ranks"),
        (8, (2, 2), "--tp-size 2 x --cp-size 2 is 4, there are 8 ranks"),
        (4, (0, None), "--tp-size 0 does not divide"),
        (0, (None, None), "a mesh of 0 ranks"),
    ],
)
def test_what_is_not_rectangular_is_refused_with_the_numbers(ranks, asked, message):
    with pytest.raises(UsageError) as error:
        mesh_sizes(ranks, 4, *asked)
    assert message in error.value.message
    assert error.value.hint


def _beside_a_group(communicator: Communicator) -> tuple[list[float], list[float], list[str], bool]:
    """Sums of ranks over both axes, all ranks, refusals, and whether the groups that were there still work afterwards."""
    mesh = create_mesh({"tp": 3, "cp": 3}, torch.device("cpu"))
    rank = torch.tensor([float(communicator.rank)])
    sums = [float(mesh.tp.all_reduce(rank.clone())), float(mesh.cp.all_reduce(rank.clone()))]
    everyone = mesh.gather(rank).flatten().tolist()
    mesh.close()
    refused = []
    for sizes, backends in (({"tp": 2, "cp": 3}, {}), ({"tp": 3, "cp": 3}, {"cp": "nccl"}), ({"tp": 9}, {"tp": "mpi"})):
        try:
            create_mesh(sizes, torch.device("cpu"), backends=backends)
        except UsageError as error:
            refused.append(error.message)
    return sums, everyone, refused, dist.is_initialized() and float(communicator.all_reduce(rank.clone())) == 36


def test_beside_an_existing_process_group(world):
    for rank, (sums, everyone, refused, works) in enumerate(world.run_group(9, _beside_a_group)):
        row, column = rank // 3 * 3, rank % 3
        assert sums == [3 * row + 3, 3 * column + 9]
        assert everyone == list(range(9))
        assert refused[0] == "a mesh of tp 2 x cp 3 has 6 ranks, 9 are there"
        assert refused[1].startswith("axis cp: nccl needs a GPU for every rank")
        assert refused[2] == "axis tp: backend 'mpi' is unknown"
        assert works


@pytest.mark.parametrize(
    ("sizes", "backends", "message"),
    [
        ({"tp": 1, "cp": 1}, {}, "a mesh of tp 1 x cp 1 has 1 rank, 4 are there"),
        ({"tp": 0, "cp": 4}, {}, "a mesh of tp 0 x cp 4 has 0 ranks, 4 are there"),
        ({"tp": -1, "cp": -4}, {}, "a mesh of tp -1 x cp -4 has 4 ranks, 4 are there"),
        ({"tp": 2, "cp": 2}, {"pp": "host"}, "backend 'host' is for axis 'pp', the mesh is tp 2 x cp 2"),
    ],
)
def test_what_does_not_suit_the_ranks_of_torchrun_is_refused_before_they_meet(sizes, backends, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError) as error:
        create_mesh(sizes, torch.device("cpu"), backends=backends)
    assert error.value.message == message
    assert not dist.is_initialized()


def test_one_rank_needs_no_process_group():
    mesh = create_mesh({"tp": 1, "cp": 1})
    assert (mesh.tp.size, mesh.cp.size, mesh.tp.backend) == (1, 1, "none")
    mesh.close()
    assert not dist.is_initialized()


_PROGRAM = """
import json, os, pathlib, sys, torch, torch.distributed as dist
from mgtp.runtime.mesh import create_mesh, mesh_sizes
from mgtp.shardplan.errors import UsageError
sizes, cpu, one, seen = mesh_sizes(int(os.environ["WORLD_SIZE"]), num_kv_heads=2), torch.device("cpu"), torch.ones(1), []
try:
    create_mesh(sizes, cpu, backends={"cp": "nccl"})
    sys.exit("not refused")
except UsageError:
    assert not dist.is_initialized()
for _ in range(2):  # the second must not meet what the first has left in torchrun's store
    mesh = create_mesh(sizes, cpu)
    sums = [float(mesh.tp.all_reduce(one.clone())), float(mesh.cp.all_reduce(one.clone()))]
    seen.append([mesh.tp.rank, mesh.cp.rank, *sums])
    mesh.close()
    assert not dist.is_initialized()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(seen))
"""


@pytest.mark.soak
def test_under_torchrun(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    subprocess.run([*torchrun, str(program), str(tmp_path)], check=True, timeout=120, capture_output=True)
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert seen == [[own] * 2 for own in ([0, 0, 2, 2], [1, 0, 2, 2], [0, 1, 2, 2], [1, 1, 2, 2])]
