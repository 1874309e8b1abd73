"""Errors a user can act on: one line with the value that is wrong, then a hint.

The exit code of a command is the `exit_code` of the error that ended it.
"""


class MgtpError(Exception):
    """Something failed while running (exit code 1)."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(MgtpError):
    """An option or argument is wrong, or contradicts the shard set (exit code 2)."""

    exit_code = 2


class CheckpointError(MgtpError):
    """The checkpoint or shard set is not acceptable (exit code 3)."""

    exit_code = 3


class DeviceError(MgtpError):
    """Not enough devices or memory (exit code 4)."""

    exit_code = 4


class RankError(MgtpError):
    """A rank failed (exit code 5)."""

    exit_code = 5
