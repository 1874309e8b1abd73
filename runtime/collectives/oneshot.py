"""The oneshot backend: sums and gathers of decode size over symmetric memory, all else through another communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._C._distributed_c10d import _SymmetricMemory

from ...shardplan.errors import MgtpError
from ..communicator import Communicator
from .agreement import exchange
from .eligibility import ALIGNMENT, TWO_SHOT_BYTES, Member, Message, gathers, group_refusal, method_for, one_shot_bytes

if TYPE_CHECKING:
    from .groups import Rank


UNTRUSTED_PATIENCE = 1 << 24
"""Looks for packets, of about a microsecond each, until the self-test is passed: a kernel that hangs frees the device."""


class SymmetricWorkspace:
    """One group's symmetric memory: the same bytes on every rank, mapped by all of them. Making it is collective.

    TWO_SHOT_BYTES for torch's two-shot sums come first, then the packets of our kernel.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        from ..kernels.all_reduce import MOST_PROGRAMS
        from ..kernels.packets import Workspace, packet_area

        self.group_name, self.device = group.group_name, device
        most, size = one_shot_bytes(group.size()), group.size()
        with torch.inference_mode(False):  # so that it can be written to in either mode
            num_bytes = TWO_SHOT_BYTES + packet_area(most, size)
            self.buffer = _SymmetricMemory.empty_strided_p2p((num_bytes,), [1], torch.uint8, device).zero_()
            counts = torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # before others can write to it
        handle = symmetric_memory.rendezvous(self.buffer, group.group_name)
        packets = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device) + TWO_SHOT_BYTES
        self.kernels = Workspace(packets, counts, group.rank(), most)
        self._handle = handle  # the mappings live as long as this
        self.two_shot = hasattr(torch.ops.symm_mem, "two_shot_all_reduce_out")

    def view_like(self, x: torch.Tensor) -> torch.Tensor:
        """The beginning of the buffer as a tensor of `x`'s shape and dtype."""
        return self.buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)


class OneShotCommunicator:
    """Sums that `eligibility` lets pass go over symmetric memory; `fallback` does the rest."""

    backend = "oneshot"

    def __init__(self, memory: SymmetricWorkspace, fallback: Communicator) -> None:
        self.memory, self.fallback = memory, fallback
        self.rank, self.size, self.capturable = fallback.rank, fallback.size, fallback.capturable
        self.patience, self.fuses = UNTRUSTED_PATIENCE, True

    def trust(self, fuses: bool) -> None:
        """The self-test is passed: from now on the front is who ends a wait. `fuses`: norms are to sum where they can."""
        from ..kernels.all_reduce import PATIENCE

        self.patience, self.fuses = PATIENCE, fuses

    def method(self, tensor: torch.Tensor) -> str:
        """one-shot, two-shot or fallback."""
        return method_for(_message(tensor), self.size, self.memory.two_shot)[0]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks: a new tensor, or `fallback`'s."""
        method = self.method(tensor)
        if method == "one-shot":
            from ..kernels.all_reduce import all_reduce

            return all_reduce(_aligned(tensor), self.memory.kernels, self.patience)
        if method == "two-shot":
            shared, total = self.memory.view_like(tensor), torch.empty_like(tensor)
            shared.copy_(tensor)
            torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self.memory.group_name, total)
            return total
        return self.fallback.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, *tensor.shape] in rank order."""
        if gathers(_message(tensor), self.size):
            from ..kernels.all_reduce import all_gather

            return all_gather(_aligned(tensor.contiguous()), self.memory.kernels, self.patience)
        return self.fallback.all_gather(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """`source`'s tensor, in place."""
        if gathers(_message(tensor), self.size):
            return tensor.copy_(self.all_gather(tensor)[source])
        return self.fallback.broadcast(tensor, source)

    def shift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the rank before this one in the ring."""
        return self.fallback.shift(tensor)

    def send_product(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Send x W^T from within the product to the next call of all ranks, `all_reduce_add_rms_norm`.

        False, and nothing sent, where this rank has to be given the product. Ranks may differ in that.
        """
        if not self._goes_by_rows(x, len(weight)):
            return False
        from ..kernels.linear import send_linear

        return send_linear(x, weight, self.memory.kernels)

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        one_plus: bool,
        cast_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(s + residual), s + residual) of the sum s over ranks: one kernel where that is possible and pays.

        `x` [T, H] has no columns where it has been sent, and there may be no tokens.
        """
        variant = {"one_plus": one_plus, "cast_first": cast_first}
        sent = x.shape[-1] == 0
        if sent or (self.fuses and self._goes_by_rows(x, x.shape[-1])):
            from ..kernels.all_reduce import all_reduce_add_rms_norm

            places = (residual.contiguous(), weight, eps, self.memory.kernels)
            part = None if sent else _aligned(x.contiguous())
            return all_reduce_add_rms_norm(part, *places, **variant, patience=self.patience)
        from ..kernels.norm import add_rms_norm

        return add_rms_norm(self.all_reduce(x), residual, weight, eps, **variant)

    def _goes_by_rows(self, x: torch.Tensor, columns: int) -> bool:
        """Whether parts [T, columns] of x's T and dtype are sent at once, as packets of which none has numbers of two rows."""
        row_bytes = columns * x.element_size()
        message = Message(_name(x.dtype), len(x) * row_bytes, dims=2)
        return method_for(message, self.size)[0] == "one-shot" and row_bytes % 4 == 0

    def close(self) -> None:
        """Unmap the others' memory, once none of them reads ours."""
        torch.cuda.synchronize(self.memory.device)
        self.fallback.all_gather(torch.zeros(1, device=self.memory.device))
        torch.cuda.synchronize(self.memory.device)
        del self.memory


def _message(tensor: torch.Tensor) -> Message:
    return Message(_name(tensor.dtype), tensor.nbytes, tensor.dim(), tensor.is_contiguous())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """For wide loads. A copy, rather than another way that the other ranks would not take."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def agree_on_members(ranks: Sequence[Rank], control: Communicator) -> list[Member]:
    """The group as every rank of it sees the others' memory."""
    mine = ranks[control.rank]
    maps = [
        other.node == mine.node
        and (other.index == mine.index or torch.cuda.can_device_access_peer(mine.index, other.index))
        for other in ranks
    ]
    member = Member(control.rank, mine.node, mine.index, maps)
    said = exchange(control, msgspec.json.encode(member).decode())
    return [msgspec.json.decode(text, type=Member) for text in said]


def make_oneshot(
    group: dist.ProcessGroup, members: Sequence[Member], device: torch.device, allow_shared: bool, base: Communicator
) -> OneShotCommunicator:
    """The backend over `group` (gloo: it only carries handles); raises MgtpError where the group is not eligible."""
    refusal = group_refusal(members, allow_shared)
    if refusal:
        raise MgtpError(refusal, "use --collective nccl or host")
    return OneShotCommunicator(SymmetricWorkspace(group, device), base)
