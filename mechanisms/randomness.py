"""Where a mechanism's randomness comes from: what the samplers need, and no more."""

from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray


class NoiseSource(Protocol):
    """A stream of independent random numbers.

    ``numpy.random.Generator`` satisfies it, for simulation and tests; ``coterie.rng.secure()`` is the one for
    real noise. A mechanism's guarantee holds only as far as nobody can predict the stream.
    """

    @overload
    def random(self) -> float: ...

    @overload
    def random(self, size: int) -> NDArray[np.float64]: ...

    def random(self, size: int | None = None) -> float | NDArray[np.float64]:
        """One number, or ``size`` of them, uniform on [0, 1): multiples of 2⁻⁵³."""

    def standard_normal(self, *, out: NDArray[np.float64]) -> NDArray[np.float64]:
        """Fill the contiguous array ``out`` with independent N(0, 1) numbers and return it."""

    def standard_gamma(self, shape: float) -> float:
        """One Gamma(``shape``, scale 1) number."""
