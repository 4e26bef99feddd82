"""The Euclidean ball that a fixed-radius guarantee speaks of, and clipping into it."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.mechanisms.arguments import CHUNK, expect_positive, expect_vector, sum_of_squares


def euclidean_norm(vector: ArrayLike) -> float:
    """‖v‖₂ of an array of any shape, in float64, without overflow or underflow on the way.

    The relative error is below (n + 8)·2⁻⁵³ for n numbers. Raises ``ValueError`` for an empty or non-finite
    array.
    """
    flat = expect_vector("vector", vector)
    exponent = _exponent(flat)
    try:
        return math.ldexp(_scaled_norm(flat, exponent), exponent)
    except OverflowError:
        return math.inf


def clip(update: ArrayLike, radius: float) -> NDArray[np.float64]:
    """The update scaled into the ball of ``radius`` C: v·min(1, C/‖v‖₂), a new float64 array of v's shape.

    The result's norm is at most C *as evaluated in floating point*, in float64 and any order of summation (or
    exactly, as by ``math.fsum``), for every C whose square does not underflow: a vector is left as it is only
    if its norm is below C by a rounding margin m = (n + 8)·2⁻⁵³, and else scaled to C·(1 − 2m). So clipping
    twice is the same as clipping once, and a vector whose norm equals C is scaled by 1 − 2m (about 10⁻¹⁵ for
    small n). The margin: a sum of n squares in any order is right to a relative n·2⁻⁵³, its root to half of
    that.

    | update | result |
    |---|---|
    | norm within C | an equal copy |
    | zero | zero |
    | a finite vector whose norm overflows float64 | scaled to norm C, as any other |
    | C so small that the scaled vector is not representable inside the ball | zero |
    | any inf or NaN, no numbers at all | ``ValueError``: such a vector must not leave |

    The input is never written to. Any two results are at most 2C apart, and n values cost one new array of n
    float64.
    """
    expect_positive("radius", radius)
    flat = expect_vector("update", update)
    margin = (flat.size + 8) * 2.0**-53
    exponent = _exponent(flat)
    norm = _scaled_norm(flat, exponent)
    clipped = flat.astype(np.float64)
    # With C as fraction·2^power both sides of norm·2^exponent > C can be compared without overflow.
    fraction, power = math.frexp(radius)
    shift = max(-1000, min(1000, power - exponent))
    if norm * (1 + margin) > math.ldexp(fraction, shift):
        factor = radius * (1 - 2 * margin) / norm
        for start in range(0, clipped.size, CHUNK):
            chunk = clipped[start : start + CHUNK]
            np.ldexp(chunk, -exponent, out=chunk)
            chunk *= factor
        # Only among subnormal numbers can rounding undo the margin.
        if radius < 2.0**-900 and not _inside(clipped, radius, margin):
            clipped[:] = 0.0
    return clipped.reshape(np.shape(update))


def _exponent(flat: NDArray[Any]) -> int:
    """The e with max|v_i| in [2^(e−1), 2^e); 0 for the zero vector."""
    chunks = (flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK))
    return math.frexp(max(max(float(chunk.max()), -float(chunk.min())) for chunk in chunks))[1]


def _scaled_norm(flat: NDArray[Any], exponent: int) -> float:
    """‖v·2^(−exponent)‖₂, whose terms neither overflow nor matter where they underflow."""
    squares = []
    for start in range(0, flat.size, CHUNK):
        chunk = np.ldexp(flat[start : start + CHUNK].astype(np.float64), -exponent)
        squares.append(sum_of_squares(chunk))
    return math.sqrt(math.fsum(squares))


def _inside(flat: NDArray[np.float64], radius: float, margin: float) -> bool:
    exponent = math.frexp(radius)[1]
    return _scaled_norm(flat, exponent) * (1 + margin) <= math.ldexp(radius, -exponent)
