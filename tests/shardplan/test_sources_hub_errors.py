"""What huggingface_hub and the system raise during a download is shown as one line of bounded length, with a hint."""

from __future__ import annotations

import pytest

from mgtp.shardplan.sources.hub_errors import translate


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (OSError(28, "No space left on device"), "no space left for the download", "HF_HOME"),
        (PermissionError(13, "Permission denied"), "cannot be used", "HF_HOME"),
        (NotADirectoryError(20, "Not a directory", "x"), "cannot be used", "HF_HOME"),
        (OSError(30, "Read-only file system"), "cannot be used", "HF_HOME"),
        (TimeoutError("The read operation\ntimed out"), "TimeoutError: The read operation timed out", "HF_ENDPOINT"),
        (RuntimeError(), "failed: RuntimeError", "HF_ENDPOINT"),
        (ValueError("x" * 5000), "xxx", "HF_ENDPOINT"),
    ],
)
def test_failures_of_disk_and_network_are_one_line(error: Exception, message: str, hint: str) -> None:
    found = translate(error, "org/name", None)
    assert found.message.startswith("org/name: ")
    assert message in found.message
    assert "\n" not in found.message
    assert len(found.message) < 500
    assert hint in found.hint
