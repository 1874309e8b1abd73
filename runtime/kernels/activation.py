"""act(gate) * up in one pass, for the gated feed-forward block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Kernel, cdiv, power_of_2, start_dependents, wait_for_inputs


@triton.jit
def tanh(x):
    """Hyperbolic tangent by way of the logistic function: exact at both ends, where exp would overflow."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(x, ACT: tl.constexpr):
    """One of the activations that config.json names, in float32."""
    tl.static_assert(ACT == "silu" or ACT == "gelu" or ACT == "relu" or ACT == "gelu_new" or ACT == "gelu_pytorch_tanh")
    if ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "relu":
        x = tl.maximum(x, 0.0)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return x


@triton.jit
def gated(gate, up, ACT: tl.constexpr, DTYPE):
    """act(gate) * up of float32 values, rounded where torch's own operations round."""
    acted = activate(gate.to(DTYPE).to(tl.float32), ACT).to(DTYPE).to(tl.float32)
    return acted * up.to(DTYPE).to(tl.float32)


@triton.jit
def _gated_activation(
    gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr
):
    start_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype = out_ptr.dtype.element_ty
    at = gate_up_ptr + row * (2 * SIZE) + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, gated(gate, up, ACT, dtype).to(dtype), mask=inside)


_kernel = Kernel(_gated_activation)


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """[T, 2 I], gate before up -> [T, I]"""
    gate_up = gate_up.contiguous()
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, size))
    if tokens:
        block = min(2048, power_of_2(size))
        constants = {"SIZE": size, "BLOCK": block, "ACT": activation}
        _kernel((tokens, cdiv(size, block)), (gate_up, out), constants, warps=4)
    return out
