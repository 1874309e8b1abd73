"""Finds the packages: each folder below, with every package under it, is imported as `mgtp.<folder>`.

`mgtp` itself is a namespace package and has no folder. Everything else is declared in pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("cli", "runtime", "shardplan")

setup(
    package_dir={f"mgtp.{folder}": folder for folder in FOLDERS},
    packages=[f"mgtp.{name}" for name in find_packages(include=[*FOLDERS, *(f"{folder}.*" for folder in FOLDERS)])],
)
