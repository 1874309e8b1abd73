"""How much memory is free: of the GPUs as NVML tells it, which needs no context on them, and of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from .devices import DriverError, visible_gpus
from .host_memory import host_free_bytes

HOST = -1
"""Stands for the host's memory where GPUs are named by index."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def total_bytes(device: str) -> dict[int, int]:
    """Bytes of every GPU that `device` ('auto', 'cuda' or 'cpu') lets ranks use, by index."""
    try:
        return {} if device == "cpu" else {gpu.index: gpu.total_bytes for gpu in visible_gpus()}
    except DriverError:
        return {}


def free_bytes(device: str) -> dict[int, int]:
    """Free bytes of the same GPUs, and of the host. A GPU that NVML does not know counts as empty."""
    free = total_bytes(device)
    measured = _measure_all(list(free)) if free else {}
    return {**free, **measured, HOST: host_free_bytes()}


def _measure_all(indices: Sequence[int]) -> dict[int, int]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    if nvml.nvmlInit_v2() != 0:
        return {}
    try:
        measured = {index: _measure(nvml, index) for index in indices}
    finally:
        nvml.nvmlShutdown()
    return {index: size for index, size in measured.items() if size is not None}


def _measure(nvml: ctypes.CDLL, index: int) -> int | None:
    handle, memory = ctypes.c_void_p(), _Memory()
    uuid = _uuid(index)
    if uuid is None:
        return None
    for kind in ("GPU", "MIG"):
        if nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}".encode(), ctypes.byref(handle)) == 0:
            known = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
            return memory.free if known else None
    return None


def _uuid(index: int) -> str | None:
    """A visible GPU's UUID, by which NVML knows it whatever CUDA_VISIBLE_DEVICES says."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetUuid_v2(raw, device):
        return None
    text = bytes(raw).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
