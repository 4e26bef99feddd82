"""What an argument must be: each check raises one ``ValueError`` naming the argument and the value found."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

CHUNK = 1 << 16  # coordinates worked on at a time: half a megabyte of float64, which stays in cache


def expect_positive(name: str, value: float) -> None:
    """A finite number above zero."""
    if not 0 < value < math.inf:
        raise ValueError(f"Expected {name} > 0 and finite, found {value}")


def expect_distance(name: str, value: float) -> None:
    """A number at or above zero; infinity is allowed."""
    if not value >= 0:
        raise ValueError(f"Expected {name} >= 0, found {value}")


def expect_probability(name: str, value: float) -> None:
    """A number from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"Expected {name} between 0 and 1, found {value}")


def expect_count(name: str, value: int, least: int = 1) -> None:
    """A whole number at or above ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"Expected {name} to be a whole number >= {least}, found {value!r}")


def expect_vector(name: str, value: ArrayLike, dimension: int | None = None) -> NDArray[Any]:
    """``value`` as a flat array of finite real numbers, never empty, of length ``dimension`` if one is given.

    The array may be a view of ``value``, in its own dtype. It is checked chunk by chunk, without a copy.
    """
    array = np.asarray(value)
    if not np.can_cast(array.dtype, np.float64, "same_kind"):
        raise ValueError(f"Expected {name} to hold real numbers, found dtype {array.dtype}")
    if array.size == 0 or (dimension is not None and array.size != dimension):
        wanted = "at least one number" if dimension is None else f"{dimension} numbers"
        raise ValueError(f"Expected {name} to hold {wanted}, found {array.size}")
    flat: NDArray[Any] = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        chunk = flat[start : start + CHUNK]
        finite = np.isfinite(chunk)
        if not finite.all():
            # The position is left out on purpose: an error's text may reach the other side.
            raise ValueError(f"Expected {name} to be finite, found {chunk[~finite][0]}")
    return flat


def sum_of_squares(vector: NDArray[np.float64]) -> float:
    """Σ v_i² of a flat array, in one thread: a BLAS product would wake a pool of threads, in every client."""
    return float(np.einsum("i,i->", vector, vector))
