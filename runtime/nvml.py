"""The few things that only NVIDIA's management library knows: the driver's version and NVLink. By ctypes, if it is there."""

from __future__ import annotations

import ctypes

_NVLINK, _OK = 2, 0
"""NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK"""

_MOST_LINKS = 18


class Nvml:
    """NVML for as long as the process lives. Every answer is None where the library is missing or does not know."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if library.nvmlInit_v2() == 0:
            self._library = library

    def driver_version(self) -> str | None:
        """Such as 580.159.04."""
        text = ctypes.create_string_buffer(96)
        if self._library is None or self._library.nvmlSystemGetDriverVersion(text, len(text)):
            return None
        return text.value.decode()

    def num_nvlinks(self, uuid: str) -> int | None:
        """NVLink lanes of a GPU that are up."""
        device = self._device(uuid)
        if self._library is None or device is None:
            return None
        active, count = ctypes.c_uint(), 0
        for link in range(_MOST_LINKS):
            failed = self._library.nvmlDeviceGetNvLinkState(device, ctypes.c_uint(link), ctypes.byref(active))
            count += 0 if failed else active.value
        return count

    def are_linked(self, first: str, second: str) -> bool | None:
        """Whether two GPUs reach each other over NVLink, directly or through switches."""
        devices = self._device(first), self._device(second)
        status = ctypes.c_int()
        if self._library is None or None in devices:
            return None
        failed = self._library.nvmlDeviceGetP2PStatus(*devices, ctypes.c_int(_NVLINK), ctypes.byref(status))
        return None if failed else status.value == _OK

    def _device(self, uuid: str) -> ctypes.c_void_p | None:
        device = ctypes.c_void_p()
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        if self._library is None or self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)):
            return None
        return device
