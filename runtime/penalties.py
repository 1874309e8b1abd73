"""Penalties and logit_bias: what a sequence has said already, and what its request wants said, changes its logits.

Shapes: S sequences of the batch, P of them with penalties, V vocabulary (padding included).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .kernels import use_kernels
from .sampling_params import SamplingParams


class TokenHistory:
    """Which tokens one sequence holds, on the device: what the penalties look at."""

    def __init__(
        self, prompt_ids: Iterable[int], generated_ids: Iterable[int], vocab_size: int, device: torch.device | str
    ) -> None:
        self.in_prompt = self._count(prompt_ids, vocab_size).bool().to(device)
        """bool [V]"""
        self.generated = self._count(generated_ids, vocab_size).to(device)
        """int32 [V]: how often each token was generated"""
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    @staticmethod
    def _count(ids: Iterable[int], vocab_size: int) -> Tensor:
        known = torch.tensor([token_id for token_id in ids if token_id < vocab_size], dtype=torch.int64)
        return torch.bincount(known, minlength=vocab_size).to(torch.int32)

    @torch.inference_mode()  # the counts may have been made in this mode, and could then not be changed outside of it
    def add(self, token_id: Tensor) -> None:
        """Count one more generated token, int64 [1] on the device; does not wait for the device."""
        self.generated.index_add_(0, token_id, self._one)


def record(history: Sequence[TokenHistory | None], ids: Tensor) -> None:
    """Add the ids [S] that were chosen to the histories that are kept."""
    kept = [(row, tokens) for row, tokens in enumerate(history) if tokens is not None]
    if kept and ids.is_cuda:
        from .kernels.penalties import count_tokens

        places = torch.tensor([(row, tokens.generated.data_ptr()) for row, tokens in kept])
        count_tokens(to_device(places, ids.device), ids)
        return
    for row, tokens in kept:
        tokens.add(ids[row : row + 1])


class Adjustment:
    """Penalties and logit_bias."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self._rows = [row for row, each in enumerate(params) if each.needs_history]
        self._index = to_device(torch.tensor(self._rows, dtype=torch.int64), device)
        column = columns([params[row] for row in self._rows], device)
        self._repetition = column(lambda each: each.repetition_penalty, torch.float32)
        self._presence = column(lambda each: each.presence_penalty, torch.float32)
        self._frequency = column(lambda each: each.frequency_penalty, torch.float32)
        biases = [
            (row, token_id, bias)
            for row, each in enumerate(params)
            for token_id, bias in each.logit_bias.items()
            if token_id < vocab_size
        ]
        self._bias_rows, self._bias_ids = (
            to_device(torch.tensor([bias[part] for bias in biases], dtype=torch.int64), device) for part in (0, 1)
        )
        self._bias = to_device(torch.tensor([bias for _, _, bias in biases], dtype=torch.float64), device)

    def __call__(self, logits: Tensor, history: Sequence[TokenHistory | None] | None) -> Tensor:
        """The logits [S, V] after penalties and bias, as a new float tensor."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if self._rows:
            histories = [None if history is None else history[row] for row in self._rows]
            if any(each is None for each in histories):
                raise ValueError("a request with penalties needs its history")
            self._penalise(logits, [each for each in histories if each is not None])
        if len(self._bias):
            logits.index_put_((self._bias_rows, self._bias_ids), self._bias.to(logits.dtype), accumulate=True)
        return logits

    def _penalise(self, logits: Tensor, histories: Sequence[TokenHistory]) -> None:
        """Apply the three penalties to the P rows of `logits` [S, V] that have any, each with its own history."""
        if use_kernels(logits):
            from .kernels.penalties import penalise

            addresses = torch.tensor([(each.generated.data_ptr(), each.in_prompt.data_ptr()) for each in histories])
            addresses = to_device(addresses, logits.device)
            penalise(logits, self._index, addresses, self._repetition, self._presence, self._frequency)
            return
        generated = torch.stack([each.generated for each in histories])
        in_prompt = torch.stack([each.in_prompt for each in histories])
        before = logits[self._index]
        repeated = torch.where(before < 0, before * self._repetition, before / self._repetition)
        after = torch.where(in_prompt | (generated > 0), repeated, before)
        after = after - self._frequency * generated - self._presence * (generated > 0)
        logits.index_copy_(0, self._index, after)


def columns(params: Sequence[SamplingParams], device: torch.device) -> Callable[..., Tensor]:
    """A function that makes a [R, 1] tensor of a value of every request."""

    def column(value: Callable[[SamplingParams], float], dtype: torch.dtype) -> Tensor:
        return to_device(torch.tensor([[value(each)] for each in params], dtype=dtype), device)

    return column


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, from pinned memory, so that the host need not wait for the device."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
