"""Ranks get devices before anything is started, or a refusal that names both numbers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mgtp.runtime.launch import devices
from mgtp.runtime.launch.devices import RANK_BYTES, DriverError, Gpu, describe, place_ranks
from mgtp.runtime.threads import asked_threads
from mgtp.shardplan.errors import DeviceError, UsageError


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that the driver shows this many GPUs."""

    def show(count: int) -> None:
        found = [Gpu(i, "NVIDIA H200", 150 << 30) for i in range(count)]
        monkeypatch.setattr(devices, "visible_gpus", lambda: found)

    return show


def test_one_device_a_rank(gpus):
    gpus(4)
    placement = place_ranks(2, "auto", None, allow_shared=False)
    assert (placement.device, placement.indices) == ("cuda", (0, 1))
    assert describe(placement, "auto").startswith("detected 4 GPU(s): 0: NVIDIA H200")


def test_chosen_devices_keep_their_order(gpus):
    gpus(4)
    assert place_ranks(2, "cuda", [3, 1], allow_shared=False).indices == (3, 1)


def test_more_ranks_than_devices_is_refused_with_both_numbers(gpus):
    gpus(2)
    with pytest.raises(DeviceError) as error:
        place_ranks(4, "auto", None, allow_shared=False)
    assert error.value.exit_code == 4
    assert "4 devices" in error.value.message
    assert "2 of 2 visible" in error.value.message
    for way_out in ("--tp-size 2", "--device cpu", "--allow-shared-device"):
        assert way_out in error.value.hint


def test_shared_devices_are_filled_in_turn(gpus):
    gpus(2)
    assert place_ranks(4, "auto", None, allow_shared=True).indices == (0, 1, 0, 1)


@pytest.mark.parametrize("chosen", [[2], [0, 5], [-1]])
def test_an_index_that_does_not_exist_names_the_valid_range(gpus, chosen):
    gpus(2)
    with pytest.raises(UsageError, match=r"--devices -?\d does not exist") as error:
        place_ranks(1, "auto", chosen, allow_shared=False)
    assert error.value.hint == "valid: 0 to 1"


def test_a_device_named_twice_needs_the_flag(gpus):
    gpus(2)
    with pytest.raises(UsageError, match="names a device twice"):
        place_ranks(2, "auto", [1, 1], allow_shared=False)
    assert place_ranks(2, "auto", [1, 1], allow_shared=True).indices == (1, 1)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_more_ranks_than_the_host_can_hold_are_refused(gpus, monkeypatch, device):
    gpus(2)
    monkeypatch.setattr("mgtp.runtime.launch.devices.host_free_bytes", lambda: 3 * RANK_BYTES + 5)
    assert place_ranks(1, device, None, allow_shared=True, cp_size=3)
    with pytest.raises(DeviceError, match=r"^4 ranks need 536870912 bytes") as error:
        place_ranks(2, device, None, allow_shared=True, cp_size=2)
    assert error.value.hint == "use 3 or fewer"
    monkeypatch.setattr("mgtp.runtime.launch.devices.host_free_bytes", lambda: RANK_BYTES - 1)
    with pytest.raises(DeviceError) as error:
        place_ranks(1, device, None, allow_shared=True)
    assert error.value.hint == "end what else runs there", "not even one would fit"
    with pytest.raises(DeviceError, match=r"^1000000000000 ranks"):  # nothing is made for each of them
        place_ranks(1, device, None, allow_shared=True, cp_size=10**12)


@pytest.mark.parametrize(
    ("value", "threads"), [("", None), ("3", 3), (" 4, 2", 4), ("abc", 0), ("0", 0), ("-1", 0), (",", 0)]
)
def test_threads_are_a_number_or_refused_before_anything_is_started(gpus, monkeypatch, value, threads):
    """OpenMP takes one number a level of nesting."""
    gpus(0)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    if threads == 0:
        with pytest.raises(UsageError, match=f"OMP_NUM_THREADS={value} is not"):
            place_ranks(2, "cpu", None, allow_shared=False)
    else:
        assert place_ranks(2, "cpu", None, allow_shared=False) and asked_threads() == threads


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(gpus):
    gpus(0)
    placement = place_ranks(3, "auto", None, allow_shared=False)
    assert placement.device == "cpu"
    assert "running on the CPU" in describe(placement, "auto")
    with pytest.raises(DeviceError, match="no GPU is visible"):
        place_ranks(1, "cuda", None, allow_shared=False)
    with pytest.raises(DeviceError, match="no GPU is visible"):
        place_ranks(1, "auto", [0], allow_shared=False)


def test_a_broken_driver_is_an_error_only_for_those_who_ask_for_cuda(monkeypatch):
    def broken() -> list[Gpu]:
        raise DriverError("cuInit: CUDA_ERROR_UNKNOWN (999)")

    monkeypatch.setattr(devices, "visible_gpus", broken)
    assert place_ranks(1, "auto", None, allow_shared=False).device == "cpu"
    with pytest.raises(DeviceError, match="CUDA_ERROR_UNKNOWN"):
        place_ranks(1, "cuda", None, allow_shared=False)


@pytest.mark.parametrize("device", ["gpu", "cuda:0", ""])
def test_unknown_device_names_are_refused(device):
    with pytest.raises(UsageError, match="--device"):
        place_ranks(1, device, None, allow_shared=False)


@pytest.mark.parametrize(
    "value", ["", "0,0", "9", "-1", "GPU-8d7c6b5a-0000-1111-2222-333344445555", "MIG-1/2/3", "0,,x"]
)
def test_odd_visible_devices_start_or_are_one_clear_line(value):
    """In a process of its own: the driver reads the variable once. Nothing here parses it."""
    code = "from mgtp.runtime.launch.devices import place_ranks; place_ranks(1, {!r}, None, False)"
    for device in ("auto", "cuda"):
        run = subprocess.run(
            [sys.executable, "-c", code.format(device)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": value},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if run.returncode:
            last = run.stderr.splitlines()[-1]
            assert device == "cuda" and f"CUDA_VISIBLE_DEVICES={value}" in last, last
