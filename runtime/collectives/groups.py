"""The process groups of some ranks of a mesh axis, and the communicator over them."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from ..communicator import Communicator, GroupCommunicator, HostCommunicator
from .choice import Factory, choose


@dataclass(frozen=True)
class Rank:
    """A rank of the run: its number, node and device ('cuda:0')."""

    number: int
    node: str
    device: str

    @property
    def index(self) -> int:
        """The GPU's index."""
        return torch.device(self.device).index


def node_name() -> str:
    """This machine, as it was started: two machines may have one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


class AxisGroup:
    """Process groups over `members`. All ranks of the run must make them, in one order; only members may use them.

    `control` carries what ranks agree on, so that a candidate that hangs cannot leave `host` half way through.
    """

    def __init__(
        self,
        members: Sequence[Rank],
        device: torch.device,
        asked: str,
        allow_shared_device: bool,
        timeout: datetime.timedelta,
    ) -> None:
        self.members, self.device, self.asked = members, device, asked
        self.allow_shared_device, self._timeout = allow_shared_device, timeout
        self.made: list[dist.ProcessGroup] = []
        self.control, self.host = self._group("gloo"), self._group("gloo")
        on_gpus = all(m.device.startswith("cuda") for m in members)
        shared = len({(m.node, m.device) for m in members}) < len(members)
        self.nccl = self._group("nccl") if on_gpus and not shared else None
        self.on_gpus = on_gpus

    def _group(self, backend: str) -> dist.ProcessGroup | None:
        group = dist.new_group([m.number for m in self.members], timeout=self._timeout, backend=backend)
        if not isinstance(group, dist.ProcessGroup):
            return None  # other ranks' group
        self.made.append(group)
        return group

    @cached_property
    def communicator(self) -> tuple[Communicator, str]:
        """What was asked for or chosen, and why; for members only, all at the same time."""
        control, host = self.host_communicators()
        factories = self.factories(control, host) if self.on_gpus and self.asked != "host" else {}
        chosen, reason = choose(self.asked, factories, control, self.device)
        return (host if chosen is control else chosen), reason

    def host_communicators(self) -> tuple[HostCommunicator, HostCommunicator]:
        """(for agreeing, for data)"""
        assert self.control is not None and self.host is not None
        return HostCommunicator(self.control), HostCommunicator(self.host)

    def factories(self, control: Communicator, host: Communicator) -> dict[str, Factory]:
        """The backends that these ranks' devices allow, besides the host."""
        from .oneshot import agree_on_members, make_oneshot

        members = agree_on_members(self.members, control)
        group, nccl = self.host, self.nccl
        assert group is not None

        def oneshot() -> Communicator:
            base = host if nccl is None else GroupCommunicator(nccl)
            return make_oneshot(group, members, self.device, self.allow_shared_device, base)

        return {"oneshot": oneshot} if nccl is None else {"nccl": lambda: GroupCommunicator(nccl), "oneshot": oneshot}
