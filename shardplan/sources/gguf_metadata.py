"""The key/value metadata of a GGUF file, read with the type that a key must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..values import is_finite_number, shown

CONVERT_AGAIN = "convert the model again with a current llama.cpp, or use the original checkpoint"
_MOST = (1 << 31) - 1


class Metadata:
    """Typed access to metadata; remembers which keys were asked for, so that the others can be reported.

    Values are int, float, bool, str, list[str] or, for arrays of numbers, a numpy array. Every accessor raises
    CheckpointError naming the file, the key and the value when the key is missing or has another type.
    """

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self._values = values
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self._asked.add(key)
        return key in self._values

    def error(self, message: str, hint: str = CONVERT_AGAIN) -> CheckpointError:
        """A CheckpointError about this file."""
        return CheckpointError(f"{self.where}: {message}", hint)

    def unasked(self, prefix: str) -> list[str]:
        """Keys under `prefix` that no accessor was asked for."""
        return sorted(key for key in self._values if key.startswith(prefix) and key not in self._asked)

    def integer(self, key: str, default: int | None = None) -> int:
        """A non-negative 31-bit integer; one value repeated for every layer counts as that value.

        Without `default` the key must be there.
        """
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size and (value == value[0]).all():
            value = int(value[0])
        if isinstance(value, np.ndarray):
            raise self.error(f"metadata {key!r} differs from layer to layer, which is not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise self._wrong(key, value, f"a non-negative integer, at most {_MOST}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """An integer above zero."""
        value = self.integer(key, default)
        if value == 0:
            raise self._wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; without `default` the key must be there."""
        value = self._get(key, default)
        if not is_finite_number(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def positive_number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(key, default)
        if value <= 0:
            raise self._wrong(key, value, "a positive number")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; without `default` the key must be there."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def is_array(self, key: str) -> bool:
        """Whether the key is there and holds an array."""
        return key in self and isinstance(self._values[key], list | np.ndarray)

    def strings(self, key: str) -> list[str]:
        """An array of strings, which must be there."""
        value = self._get(key, None)
        if not isinstance(value, list):
            raise self._wrong(key, value, "an array of strings")
        return value

    def numbers(self, key: str) -> np.ndarray:
        """An array of numbers or truth values, which must be there."""
        value = self._get(key, None)
        if not isinstance(value, np.ndarray):
            raise self._wrong(key, value, "an array of numbers")
        return value

    def _get(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise self.error(f"metadata {key!r} is missing")
        return value

    def _wrong(self, key: str, value: Any, wanted: str) -> CheckpointError:
        found = f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else shown(value)
        return self.error(f"metadata {key!r} must be {wanted}, not {found}")
