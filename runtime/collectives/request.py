"""What the user asked for with --collective, checked before a process is started. No torch: the front uses it."""

from __future__ import annotations

from collections.abc import Sequence

from ...shardplan.errors import UsageError

BACKENDS = ("auto", "nccl", "host", "oneshot")


def parse_collective(text: str, axes: Sequence[str]) -> dict[str, str]:
    """Of every axis the backend that was asked for: 'host' for all of them, or 'tp=oneshot,cp=nccl' (others: auto)."""
    if "=" not in text:
        return dict.fromkeys(axes, _known(text, text))
    asked: dict[str, str] = {}
    for part in text.split(","):
        axis, _, backend = part.partition("=")
        if axis not in axes:
            raise UsageError(f"--collective {text!r}: {axis!r} is not a mesh axis", f"axes: {', '.join(axes)}")
        if axis in asked:
            raise UsageError(f"--collective {text!r} names {axis} twice", "give one backend an axis")
        asked[axis] = _known(backend, text)
    return {axis: asked.get(axis, "auto") for axis in axes}


def _known(backend: str, text: str) -> str:
    if backend not in BACKENDS:
        raise UsageError(f"--collective {text!r}: {backend!r} is unknown", f"use one of {', '.join(BACKENDS)}")
    return backend


def check_placement(asked: dict[str, str], device: str, devices: Sequence[int]) -> None:
    """Refuse a backend that cannot work where the ranks will be: `devices` are their GPUs, in rank order."""
    for backend in asked.values():
        if backend in ("nccl", "oneshot") and device == "cpu":
            raise UsageError(f"--collective {backend} needs GPUs, the ranks run on the CPU", "use host or auto")
        if backend == "nccl" and len(set(devices)) < len(devices):
            raise UsageError(
                f"--collective nccl: NCCL refuses ranks that share a device ({', '.join(map(str, devices))})",
                "use host or oneshot with --allow-shared-device",
            )
