"""Runs an mgtp command, watches its rank processes, and shows which rank files each of them opened.

usage: python scripts/rank_maps.py COMMAND [ARGUMENT ...]

While COMMAND runs, /proc/PID/maps and /proc/PID/fd of every process below it that has a RANK in its environment are
read several times a second. Exits with COMMAND's code, or 1 when a rank opened a file that is not its own or no file
at all. Without /proc (macOS) the command is run and nothing is shown.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
INTERVAL_S = 0.1
RANK_FILE = re.compile(r"/(rank-(\d+)-of-(\d+)\.safetensors)$", re.MULTILINE)


@dataclass
class Rank:
    """A rank process as its environment describes it, and the rank files seen in it so far."""

    pid: int
    rank: int
    world_size: int
    files: set[str] = field(default_factory=set)

    @property
    def own_file(self) -> str:
        return f"rank-{self.rank}-of-{self.world_size}.safetensors"


def main(command: list[str]) -> int:
    if not command:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    front = subprocess.Popen(command)
    ranks: dict[int, Rank] = {}
    try:
        while front.poll() is None:
            if PROC.is_dir():
                look(front.pid, ranks)
            time.sleep(INTERVAL_S)
    except KeyboardInterrupt:
        front.wait()  # a terminal's Ctrl-C has reached it, too
    if front.returncode:
        return front.returncode if front.returncode > 0 else 128 - front.returncode
    return report(sorted(ranks.values(), key=lambda rank: (rank.rank, rank.pid))) if PROC.is_dir() else 0


def look(front: int, ranks: dict[int, Rank]) -> None:
    """Add to `ranks` what is below process `front` now, and the files that each of them has open or mapped now."""
    for pid in descendants(front):
        try:
            if rank := ranks.get(pid) or as_rank(pid):
                ranks[pid] = rank
                rank.files.update(rank_files(pid))
        except OSError:
            continue  # it has ended in the meantime


def descendants(front: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                # The name of the program may hold spaces and brackets: state and parent follow its last bracket.
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            children.setdefault(int(parent), []).append(int(folder.name))
    found = [front]
    for pid in found:  # grows while it is walked
        found += children.get(pid, [])
    return found[1:]


def as_rank(pid: int) -> Rank | None:
    """The process as a rank; None when its environment names none."""
    pairs = (entry.partition("=") for entry in (PROC / str(pid) / "environ").read_text(errors="replace").split("\0"))
    environment = {name: value for name, _, value in pairs}
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    return Rank(pid, int(environment["RANK"]), int(environment["WORLD_SIZE"]))


def rank_files(pid: int) -> set[str]:
    folder = PROC / str(pid)
    text = (folder / "maps").read_text(errors="replace")
    for descriptor in (folder / "fd").iterdir():
        try:
            text += f"\n{os.readlink(descriptor)}\n"
        except OSError:
            continue  # closed in the meantime
    return {match[1] for match in RANK_FILE.finditer(text)}


def report(ranks: list[Rank]) -> int:
    if not ranks:
        print("error: the command started no rank that could be watched", file=sys.stderr)
        return 1
    wrong = False
    for rank in ranks:
        is_right = rank.files == {rank.own_file}
        wrong |= not is_right
        files = ", ".join(sorted(rank.files)) or "no rank file"
        print(
            f"rank {rank.rank}  pid {rank.pid}  {files}{'' if is_right else f'  WRONG: expected {rank.own_file} alone'}"
        )
    print(
        f"{len(ranks)} processes, "
        + ("not each with its own file" if wrong else "each opened its own file and no other")
    )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
