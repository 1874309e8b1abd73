"""Mixtures of experts: a router picks k of E experts for every token (Shazeer et al. 2017).

Every rank holds its ffn columns of all experts, and works out the same routing from the same hidden states; partial
sums are added up over ranks once, after the weighted sum over experts.

Shapes: T tokens, H hidden, E experts, k experts a token, I columns of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..communicator import Communicator

Scores = tuple[torch.Tensor, torch.Tensor]
"""(weights [T, k], indices of experts [T, k])"""

Pick = Callable[[torch.Tensor], Scores]
"""Chooses experts by the router's logits [T, E]."""


def softmax_then_top_k(logits: torch.Tensor, k: int, *, renormalize: bool) -> Scores:
    """Probabilities over all experts, in float32; the k largest, made to sum to 1 when `renormalize`."""
    weights, indices = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), indices


def top_k_then_softmax(logits: torch.Tensor, k: int) -> Scores:
    """The k largest logits, and probabilities over these alone."""
    weights, indices = logits.topk(k, dim=-1)
    return torch.softmax(weights, dim=-1), indices


class Router:
    """Scores every token for every expert and picks; copied to every rank."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, pick: Pick) -> None:
        self.weight, self.bias, self.pick = weight, bias, pick

    def __call__(self, x: torch.Tensor) -> Scores:
        """[T, H] -> weights [T, k], experts [T, k]"""
        return self.pick(F.linear(x, self.weight, self.bias))


class Experts:
    """All experts' matrices as stacks of this rank's columns: gate_up [E, 2 I, H], down [E, H, I].

    `gate_up_bias` [E, 2 I] is cut like the matrix; down's bias is the mixture's business, since it may count only once.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
        gate_up_bias: torch.Tensor | None = None,
    ) -> None:
        self.gate_up, self.down, self.activation, self.gate_up_bias = gate_up, down, activation, gate_up_bias

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """x [T, H], weights and indices [T, k] -> this rank's part [T, H] of the weighted sum of its experts' outputs."""
        # What a graph records must not depend on the routing.
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.run_all(x, weights, indices)
        return self.run_chosen(x, weights, indices)

    def run_chosen(self, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Expert by expert over the tokens that were routed to it: an expert nobody wants costs nothing."""
        order = indices.flatten().argsort(stable=True)
        counts = indices.flatten().bincount(minlength=len(self.gate_up)).tolist()
        out = torch.zeros_like(x)
        for expert, picks in enumerate(order.split(counts)):
            if counts[expert]:
                tokens = picks // indices.shape[1]
                bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
                hidden = self.activation(F.linear(x[tokens], self.gate_up[expert], bias))
                y = F.linear(hidden, self.down[expert]) * weights.flatten()[picks].unsqueeze(-1)
                out.index_add_(0, tokens, y.to(out.dtype))
        return out

    def run_all(self, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Every expert over every token, which waits for nothing; what was not asked for is left out of the sum."""
        hidden = x @ self.gate_up.transpose(1, 2)
        if self.gate_up_bias is not None:
            hidden = hidden + self.gate_up_bias.unsqueeze(1)
        y = self.activation(hidden) @ self.down.transpose(1, 2)
        dense = weights.new_zeros(len(x), len(self.down)).scatter_(1, indices, weights).T.unsqueeze(-1)
        return (y * dense).masked_fill(dense == 0, 0).sum(0).to(x.dtype)


class MixtureOfExperts:
    """The feed-forward part of a layer: route, run the experts, sum over ranks.

    `down_bias` [E, H] is whole on every rank and added, weighted, after the sum.
    """

    def __init__(
        self, router: Router, experts: Experts, communicator: Communicator, down_bias: torch.Tensor | None = None
    ) -> None:
        self.router, self.experts, self.communicator, self.down_bias = router, experts, communicator, down_bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        weights, indices = self.router(x)
        y = self.communicator.all_reduce(self.experts(x, weights, indices))
        if self.down_bias is None:
            return y
        dense = x.new_zeros(len(x), len(self.down_bias)).scatter_(1, indices, weights.to(x.dtype))
        return y + dense @ self.down_bias
