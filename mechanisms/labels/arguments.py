"""What labels, priors and groups must be: each check raises one ``ValueError`` naming the argument and the value."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Integers = NDArray[np.int64]
Array = NDArray[np.float64]


def expect_labels(name: str, value: ArrayLike, classes: int) -> Integers:
    """Whole numbers from 0 to ``classes`` − 1, shape (n,); n = 0 is allowed."""
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"Expected {name} to be one number per example, found shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"Expected {name} to hold whole numbers, found dtype {array.dtype}")
    wrong = (array < 0) | (array >= classes)
    if wrong.any():
        raise ValueError(f"Expected {name} from 0 to {classes - 1}, found {array[wrong][0]}")
    return array.astype(np.int64, copy=False)


def expect_priors(name: str, value: ArrayLike, classes: int) -> NDArray[np.floating]:
    """Non-negative finite weights with a positive sum in each row: shape (classes,) or (rows, classes).

    Rows need not sum to 1. float32 stays float32; nothing is copied that has a floating dtype.
    """
    array = np.asarray(value)
    if array.dtype.kind in "iu":
        array = array.astype(np.float64)
    if array.dtype.kind != "f":
        raise ValueError(f"Expected {name} to hold real numbers, found dtype {array.dtype}")
    if array.ndim not in (1, 2) or array.shape[-1] != classes:
        raise ValueError(f"Expected {name} of shape ({classes},) or (rows, {classes}), found {array.shape}")
    if array.size == 0:
        return array
    least, most = array.min(), array.max()  # both are NaN if one number is
    if not (least >= 0 and most < math.inf):
        raise ValueError(f"Expected {name} >= 0 and finite, found {least if not least >= 0 else most}")
    if not array.max(axis=-1).all():
        raise ValueError(f"Expected every row of {name} to have a positive sum, found one of zeros")
    return array


def expect_groups(name: str, value: ArrayLike, examples: int, groups: int) -> Integers:
    """The group of each example, from 0 to ``groups`` − 1, shape (``examples``,)."""
    array = expect_labels(name, value, groups)
    if array.size != examples:
        raise ValueError(f"Expected {name} to hold one number for each of {examples} examples, found {array.size}")
    return array
