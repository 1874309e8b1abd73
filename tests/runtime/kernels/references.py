"""What the kernels compute, step by step with torch in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mgtp.runtime.layers.activation import ACTIVATIONS
from mgtp.runtime.layers.rotary import rotate


def add_rms_norm(x, residual, weight, eps, *, one_plus=False):
    total = x.float() if residual is None else x.float() + residual.float()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * (weight.float() + 1 if one_plus else weight.float())
    return normed, total


def linear(x, weight, bias, activation=""):
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if not activation:
        return y
    gate, up = y.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def rotated(x, cos_sin, interleaved, norm=None):
    """x [T, heads, D], cos_sin [T, rot]."""
    x = x.float()
    if norm is not None:
        x = add_rms_norm(x, None, norm.weight, norm.eps, one_plus=norm.one_plus)[0]
    cos, sin = cos_sin.chunk(2, dim=-1)
    return rotate(x, cos, sin, interleaved)


def attention(q, k, v, softmax, position):
    """q [heads, D] at `position` over k and v [tokens, kv, D] -> [heads, D]"""
    groups = q.shape[0] // k.shape[1]
    k, v = (t.float()[: position + 1].repeat_interleave(groups, dim=1) for t in (k, v))
    scores = torch.einsum("hd,thd->ht", q.float(), k) * softmax.scale
    if softmax.cap:
        scores = softmax.cap * torch.tanh(scores / softmax.cap)
    if softmax.window:
        scores[:, : max(0, position + 1 - softmax.window)] = float("-inf")
    if softmax.sinks is not None:
        scores = torch.cat([scores, softmax.sinks.float()[:, None]], dim=1)
    weights = scores.softmax(dim=-1)[:, : len(k)]
    return torch.einsum("ht,thd->hd", weights, v)
