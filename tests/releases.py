"""Which releases of libraries are installed: the references of tests differ between them."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version


def at_least(package: str, release: str) -> bool:
    return Version(version(package)) >= Version(release)
