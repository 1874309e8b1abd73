"""The collectives of one mesh axis: all-reduce, all-gather, broadcast and ring shift over the ranks of a group."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

# The name is new in torch 2.13, where the old one warns.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator(Protocol):
    """Collectives over `size` ranks, of which this process is number `rank`. All ranks call in the same order.

    `backend` is what runs them: nccl, host, oneshot, or none for a single rank. `capturable`: a CUDA graph can record
    all of them.
    """

    rank: int
    size: int
    backend: str
    capturable: bool

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place where possible; use the returned tensor."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, *tensor.shape]: every rank's tensor, in rank order. Shapes must agree."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """`source`'s tensor, in place."""
        ...

    def shift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the rank before this one in the ring, whose shape is the same. Rank 0 comes after the last."""
        ...


class SingleRank:
    """The communicator of a group of one: nothing to exchange."""

    rank, size, backend, capturable = 0, 1, "none", True

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with a leading dimension of one."""
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def shift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class GroupCommunicator:
    """Collectives that torch.distributed runs where the tensors are: NCCL on GPUs."""

    backend, capturable = "nccl", True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place unless the tensor has gaps."""
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, *tensor.shape] in rank order."""
        out = tensor.new_empty(self.size * tensor.numel())
        _gather_into(out, tensor.contiguous().view(-1), group=self.group)
        return out.view(self.size, *tensor.shape)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """`source`'s tensor, in place."""
        whole = tensor.contiguous()
        dist.broadcast(whole, group=self.group, group_src=source)
        return tensor if whole is tensor else tensor.copy_(whole)

    def shift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the rank before this one in the ring."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        tensor, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        # At once, and in one call: one after the other, all ranks of a ring would wait for their peers.
        sends = dist.P2POp(dist.isend, tensor, group=self.group, group_peer=after)
        receives = dist.P2POp(dist.irecv, received, group=self.group, group_peer=before)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        return received

    def abort(self) -> None:
        """End collectives that wait for ever. The group is of no use afterwards."""
        self.group.abort()


class HostCommunicator(GroupCommunicator):
    """Collectives over gloo, through the host's memory when tensors are elsewhere: right for any placement.

    16-bit numbers are added up in float32 and rounded once; gloo itself would round after every addition.
    """

    backend, capturable = "host", False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        narrow = tensor.dtype in (torch.bfloat16, torch.float16)
        staged = tensor.to("cpu", torch.float32 if narrow else tensor.dtype)
        total = super().all_reduce(staged)
        return tensor if total is tensor else tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, *tensor.shape] in rank order, on the tensor's device."""
        return super().all_gather(tensor.cpu()).to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """`source`'s tensor, in place."""
        staged = super().broadcast(tensor.cpu(), source)
        return tensor if staged is tensor else tensor.copy_(staged)

    def shift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the rank before this one in the ring, on the tensor's device."""
        return super().shift(tensor.cpu()).to(tensor.device)
