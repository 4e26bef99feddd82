"""The public power-of-two grid that every noisy sum is rounded to."""

import math

import numpy as np
from numpy.typing import NDArray

BITS = 20  # the grid is between 2⁻²¹ and 2⁻²⁰ of the noise's standard deviation in one coordinate
MOST = 1e150  # standard deviations up to this, and down to its inverse, leave the arithmetic room in float64


def power_of_two_grid(standard_deviation: float) -> float:
    """2^(⌊log₂ σ⌋ − 20): the spacing of the outputs for noise of standard deviation σ in one coordinate.

    It must be computed from public quantities only. It is coarse against the gaps between the float64 numbers
    that the noise can take (at one standard deviation a cell holds about 2³² of them), so that the low bits
    of an output do not show which of them was drawn, and fine against the noise (its variance grows by less
    than a relative 10⁻¹³).

    What this promises: outputs are multiples of the grid whatever the input, and as the *sum* is rounded it
    is post-processing, which costs no privacy. What it does not: it does not make a guarantee about real
    numbers into a theorem about floats. The sampled noise has finitely many values, so in principle two
    inputs' sets of reachable outputs may differ in the far tail, and logarithm, tangent and square root are
    right to a few units in the last place only. The gap is known from Mironov, "On significance of the least
    significant bits for differential privacy" (CCS 2012); no exact sampler of the L2 Laplace law is known to
    us.
    """
    return math.ldexp(1.0, math.frexp(standard_deviation)[1] - 1 - BITS)


def round_to_grid(values: NDArray[np.float64], grid: float) -> None:
    """Round ``values`` in place to the nearest multiple of ``grid``, a power of two (ties to even multiples).

    Scaling by a power of two is exact, and a value of 2⁵² grids or more is a multiple already. Raises
    ``ValueError`` for a result outside float64.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        values *= 1.0 / grid
        np.rint(values, out=values)
        values *= grid
    if not np.isfinite(values).all():
        raise ValueError("Expected the input plus its noise to fit in float64, found an overflow")
