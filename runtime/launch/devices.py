"""Which GPUs there are, asked of the CUDA driver: it honours CUDA_VISIBLE_DEVICES in every spelling.

No context is made, so nothing is left on a device.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from ...shardplan.errors import DeviceError, UsageError
from ...shardplan.values import counted
from ..threads import asked_threads
from .host_memory import host_free_bytes

RANK_BYTES = 128 << 20
"""What a rank takes of the host's memory at least, whatever its model and device: torch alone (180 MiB seen)."""

_SUCCESS, _NO_DEVICE = 0, 100


@dataclass(frozen=True)
class Gpu:
    """One visible GPU: its index as ranks see it, name and memory in bytes."""

    index: int
    name: str
    total_bytes: int


class DriverError(Exception):
    """The CUDA driver is there but does not answer as it should."""


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA shows to this process; empty where there is no driver. Raises DriverError."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    code = cuda.cuInit(0)
    if code == _NO_DEVICE:
        return []
    _check(cuda, code, "cuInit")
    count = ctypes.c_int()
    _check(cuda, cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return [_describe(cuda, i) for i in range(count.value)]


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    _check(cuda, cuda.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    _check(cuda, cuda.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
    _check(cuda, cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
    return Gpu(index, name.value.decode(errors="replace"), total.value)


def _check(cuda: ctypes.CDLL, code: int, call: str) -> None:
    if code != _SUCCESS:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        raise DriverError(f"{call}: {(text.value or b'unknown error').decode()} ({code})")


@dataclass(frozen=True)
class Placement:
    """Where ranks run: 'cuda' with a device index a rank, or 'cpu'. `detected` are the GPUs that were seen."""

    device: str
    indices: tuple[int, ...]
    detected: tuple[Gpu, ...]


def place_ranks(
    tp_size: int, device: str, devices: list[int] | None, allow_shared: bool, cp_size: int = 1
) -> Placement:
    """Choose a device for every one of tp_size * cp_size ranks, before anything is started.

    Raises UsageError for an unknown device or an index that does not exist, DeviceError when there are fewer devices
    than ranks and sharing was not allowed, or more ranks than the host can hold.
    """
    num_ranks = tp_size * cp_size
    _check_host(num_ranks)
    if device not in ("auto", "cuda", "cpu"):
        raise UsageError(f"--device {device!r} is unknown", "use auto, cuda or cpu")
    if device == "cpu":
        if devices is not None:
            raise UsageError("--devices chooses GPUs, but --device is cpu", "leave one of the two out")
        return Placement("cpu", (), ())
    gpus = _detect(device)
    if not gpus:
        if device == "cuda" or devices is not None:
            raise DeviceError(
                f"no GPU is visible (CUDA_VISIBLE_DEVICES={_visible()})", "use --device cpu to run on the CPU"
            )
        return Placement("cpu", (), ())
    chosen = list(range(len(gpus))) if devices is None else devices
    for index in chosen:
        if not 0 <= index < len(gpus):
            raise UsageError(f"--devices {index} does not exist", f"valid: 0 to {len(gpus) - 1}")
    if len(set(chosen)) < len(chosen) and not allow_shared:
        raise UsageError(f"--devices {','.join(map(str, chosen))} names a device twice", "add --allow-shared-device")
    if len(chosen) < num_ranks and not allow_shared:
        raise _too_few(tp_size, cp_size, len(chosen), len(gpus))
    return Placement("cuda", tuple(chosen[r % len(chosen)] for r in range(num_ranks)), tuple(gpus))


def _check_host(num_ranks: int) -> None:
    """Raise DeviceError for more processes than the host has memory for, UsageError for a wrong number of threads."""
    asked_threads()
    needed, free = num_ranks * RANK_BYTES, host_free_bytes()
    if needed > free:
        raise DeviceError(
            f"{counted(num_ranks, 'rank')} need {needed} bytes of the host at least, {free} are free",
            f"use {fewer} or fewer" if (fewer := free // RANK_BYTES) else "end what else runs there",
        )


def _too_few(tp_size: int, cp_size: int, usable: int, visible: int) -> DeviceError:
    """The refusal of more ranks than devices, with a size that would do."""
    shape = f"tp size {tp_size}" + (f" x cp size {cp_size}" if cp_size > 1 else "")
    fewer = f"use --cp-size {usable // tp_size}" if usable >= tp_size else f"shard for --tp-size {usable}"
    return DeviceError(
        f"{shape} needs {tp_size * cp_size} devices, {usable} of {counted(visible, 'visible GPU')} can be used",
        f"{fewer}, use --device cpu, or put several ranks on one GPU with --allow-shared-device",
    )


def _detect(device: str) -> list[Gpu]:
    try:
        return visible_gpus()
    except DriverError as error:
        if device == "auto":
            return []
        raise DeviceError(
            f"the CUDA driver failed: {error} (CUDA_VISIBLE_DEVICES={_visible()})", "check nvidia-smi"
        ) from None


def _visible() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")


def describe(placement: Placement, asked: str) -> str:
    """The line that is logged at start."""
    found = placement.detected
    if placement.device == "cuda":
        return f"detected {len(found)} GPU(s): {', '.join(f'{g.index}: {g.name}' for g in found)}"
    reason = "as asked" if asked == "cpu" else "no GPU is visible"
    return f"detected {len(found)} GPU(s): running on the CPU ({reason})"
