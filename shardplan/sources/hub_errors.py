"""What huggingface_hub raises, as one line and a hint."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CheckpointError, MgtpError, UsageError
from ..values import shown


@contextmanager
def hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Around calls into huggingface_hub: every failure becomes a CheckpointError (a malformed id: a UsageError).

    Everything is caught, since the library lets errors of its HTTP and storage clients pass, whose classes differ
    between its versions.
    """
    try:
        yield
    except MgtpError:
        raise
    except Exception as error:
        raise translate(error, repo, revision) from error


def translate(error: Exception, repo: str, revision: str | None) -> MgtpError:
    """The error to show for `error`, raised while fetching `repo`."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{repo}: access to this model is restricted",
            f"accept its terms at {constants.ENDPOINT}/{repo}, then set HF_TOKEN or run `hf auth login`",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{repo}: no such folder here, and no such model at {constants.ENDPOINT} (or it is private)",
            "check the path or the spelling; for a private model set HF_TOKEN or run `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            f"{repo}: revision {shown(revision or 'main')} does not exist",
            "--revision takes a branch, a tag or a full commit hash",
        )
    if isinstance(error, errors.HFValidationError):
        return UsageError(
            f"{repo}: no such folder here, and not a valid model id: {_reason(error)}",
            "check the path; a model on the hub is written org/name",
        )
    if constants.HF_HUB_OFFLINE and isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        at = f" at revision {revision}" if revision else ""
        return CheckpointError(
            f"{repo}: no such folder here, and not completely in the hub's cache{at} ({constants.HF_HUB_CACHE}) while "
            "HF_HUB_OFFLINE is set",
            "check the path; unset HF_HUB_OFFLINE to download a model, or set HF_HOME to where it was downloaded",
        )
    status = getattr(getattr(_root(error), "response", None), "status_code", None)
    if status is not None:
        return _http_error(repo, status, error)
    return _local_or_network(repo, error)


def _http_error(repo: str, status: int, error: Exception) -> CheckpointError:
    from huggingface_hub import constants

    if status in (401, 403):
        return CheckpointError(
            f"{repo}: no such folder here, and {constants.ENDPOINT} refuses access ({status})",
            "check the path or HF_TOKEN, or run `hf auth login`",
        )
    if status == 429 or status >= 500:
        return CheckpointError(
            f"{repo}: no such folder here, and {constants.ENDPOINT} is busy or broken ({status})",
            "check the path, or run the command again in a while",
        )
    return CheckpointError(f"{repo}: {_reason(_root(error))}", "check the model's page on the hub")


def _local_or_network(repo: str, error: Exception) -> CheckpointError:
    """No answer of the hub: a full disk, a cache that cannot be written to, a connection that failed."""
    from huggingface_hub import constants

    root = _root(error)
    number = getattr(root, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(
            f"{repo}: no space left for the download in {constants.HF_HUB_CACHE}",
            "free some space, or set HF_HOME to a larger disk",
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS) or getattr(root, "filename", None) is not None:
        return CheckpointError(
            f"{repo}: the hub cache {constants.HF_HUB_CACHE} cannot be used: {_reason(root)}",
            "set HF_HOME to a folder of yours",
        )
    return CheckpointError(
        f"{repo}: no such folder here, and the download from {constants.ENDPOINT} failed: {_reason(root)}",
        "check the path, the network and HF_ENDPOINT, then run the command again: finished files are kept",
    )


def _root(error: BaseException) -> BaseException:
    """What the library's 'not in the cache either' was raised from."""
    from huggingface_hub import errors

    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    """An error's class and text, on one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
