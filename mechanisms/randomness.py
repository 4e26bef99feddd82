"""Where a mechanism's randomness comes from: what the samplers need, and no more."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class NoiseSource(Protocol):
    """A stream of independent random numbers.

    ``numpy.random.Generator`` satisfies it, for simulation and tests; ``coterie.rng.secure()`` is the one for
    real noise. A mechanism's guarantee holds only as far as nobody can predict the stream.
    """

    def random(self) -> float:
        """One number uniform on [0, 1), with 53 random bits."""

    def standard_normal(self, *, out: NDArray[np.float64]) -> NDArray[np.float64]:
        """Fill the contiguous array ``out`` with independent N(0, 1) numbers and return it."""

    def standard_gamma(self, shape: float) -> float:
        """One Gamma(``shape``, scale 1) number."""
