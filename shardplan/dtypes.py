"""The floating-point types a shard set can have, in the spellings of the command line, safetensors and numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    import numpy as np

ITEMSIZE = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "C64": 8,
}  # fmt: skip
"""Bytes an element of every safetensors dtype that can be sized."""

PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits an element of the safetensors dtypes that are smaller than a byte; a tensor of them fills whole bytes."""

SAFETENSORS_NAME = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Command-line spelling -> safetensors spelling of the dtypes weights can have."""

COMMON_NAME = {short: name for name, short in SAFETENSORS_NAME.items()}
"""safetensors spelling -> command-line spelling."""

# The first bit pattern that is Inf or NaN, without the sign bit.
_NOT_FINITE = {"F64": 0x7FF << 52, "F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}


def itemsize(dtype: str) -> int:
    """Bytes an element of the command-line dtype `dtype` takes."""
    return ITEMSIZE[safetensors_name(dtype)]


def safetensors_name(dtype: str) -> str:
    """The safetensors spelling of a command-line dtype; raises UsageError for one weights cannot have."""
    try:
        return SAFETENSORS_NAME[dtype]
    except KeyError:
        raise UsageError(f"dtype {dtype!r} is not supported", f"use one of {', '.join(SAFETENSORS_NAME)}") from None


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a safetensors float spelling (bfloat16 comes from ml_dtypes)."""
    import ml_dtypes
    import numpy as np

    return np.dtype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}.get(name) or ml_dtypes.bfloat16)


def all_finite(values: np.ndarray) -> bool:
    """Whether a float array holds no Inf and no NaN.

    Compares bit patterns: two SIMD maxima and no temporary, for any float type. Positive Inf/NaN are the largest
    signed integers, negative ones the largest unsigned.
    """
    if values.size == 0:
        return True
    width = values.dtype.itemsize
    name = {8: "F64", 4: "F32"}.get(width) or ("F16" if values.dtype.kind == "f" else "BF16")
    limit = _NOT_FINITE[name]
    signed, unsigned = values.view(f"<i{width}"), values.view(f"<u{width}")
    return int(signed.max()) < limit and int(unsigned.max()) < limit | (1 << (8 * width - 1))
