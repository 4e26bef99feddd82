"""Privacy losses of many releases added up, and turned into (ε, δ). The convolutions are dp_accounting's."""

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from dp_accounting.pld import pld_pmf
from numpy.typing import NDArray
from scipy import optimize

from coterie.mechanisms.privacy_loss import Atoms

# The grid's interval, at most, over the root mean square standard deviation of the losses: connecting the dots moves
# the mean of a loss by at most interval²/8, that is 0.06 % of its variance. Over the standard deviation of their sum:
# a grid that is fine enough for many releases is refined for few, where it costs nothing.
_RESOLUTION = 1 / 15
_SUM_RESOLUTION = 1 / 400
_MOST_POINTS = 1 << 17  # of one release's grid: one release far above the others makes the grid coarser instead
_TAIL = 1e-15  # probability that each convolution may move to an infinite loss
_UNIT_ROUNDOFF = 2.0**-53
_LOSS_ROUNDING = 1e-11  # relative, of the losses themselves
_LARGEST_INDEX = 2.0**40
_LARGEST_EXPONENT = 600.0  # e^(−loss) loses digits soon after
_BEYOND_ANY_LOSS = 1e300


class Loss(Protocol):
    """The privacy loss of one release, for two true values at the distance that is to be hidden."""

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of the loss."""

    @property
    def window(self) -> tuple[float, float]:
        """The range that holds all but a negligible part of the loss."""

    def epsilon(self, delta: float) -> float:
        """The smallest ε at which the release is (ε, ``delta``) indistinguishable."""

    def atoms(self, interval: float) -> Atoms:
        """The loss as atoms, with panels that end at the multiples of ``interval``."""


@dataclass(frozen=True)
class _Composed:
    """A composed loss, and by how much rounding in the convolutions may have lowered any δ(ε) of it."""

    law: pld_pmf.PLDPmf
    rounding: float

    def epsilon(self, delta: float) -> float:
        """The smallest ε with δ(ε) ≤ ``delta``, from above; infinite where ``delta`` is below what can be computed."""
        target = (delta - self.rounding) * (1 - 1e-9)
        if target <= 0:
            return math.inf
        if not self._sufficient(_BEYOND_ANY_LOSS, target):
            return math.inf
        if self._sufficient(_LARGEST_EXPONENT, target):
            return float(self.law.get_epsilon_for_delta(target))
        # dp_accounting's own search sums e^(−loss), which has lost its digits here, while its δ(ε) has not.
        low, high = _LARGEST_EXPONENT, 2 * _LARGEST_EXPONENT
        while not self._sufficient(high, target):
            low, high = high, 2 * high
        root = optimize.brentq(lambda epsilon: self._log_delta(epsilon) - math.log(target), low, high, rtol=1e-9)
        while not self._sufficient(root, target):
            root *= 1 + 1e-9
        return float(root)

    def _sufficient(self, epsilon: float, target: float) -> bool:
        return bool(self.law.get_delta_for_epsilon(epsilon) <= target)

    def _log_delta(self, epsilon: float) -> float:
        return math.log(max(self.law.get_delta_for_epsilon(epsilon), 1e-300))


def composed_epsilon(losses: Mapping[Loss, int], delta: float) -> float:
    """The smallest ε, from above, at which all releases together are (ε, ``delta``) indistinguishable.

    ``losses`` counts equal releases. Each release may be chosen after seeing the earlier ones, as long as its own
    loss stays dominated by the one counted here, which is fixed beforehand (Zhu, Dong, Wang 2022, Theorem 10). No
    releases cost 0. The answer does not depend on the order of ``losses``. It is infinite when ``delta`` is below the
    rounding errors: about 1e-12 for ten releases, 1e-8 for ten thousand.
    """
    counts = sorted(((loss, count) for loss, count in losses.items() if count > 0), key=lambda item: repr(item[0]))
    if not counts:
        return 0.0
    alone = len(counts) == 1 and counts[0][1] == 1
    found = counts[0][0].epsilon(delta) if alone else _compose(counts).epsilon(delta)
    return found * (1 + _LOSS_ROUNDING)


def connect_the_dots(atoms: Atoms, interval: float) -> tuple[int, NDArray[np.float64]]:
    """Probabilities on the multiples of ``interval``, from the first one (an integer) on, that dominate ``atoms``.

    Each mass p at loss ℓ is split over the two grid points beside it so that both p and p·e^(−ℓ) (the probability
    under Q) are kept: the result is the smallest dominating law on the grid, and δ(ε) is exact at its points
    (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi, "Connect the dots", PETS 2022).
    """
    index: NDArray[np.int64] = np.floor(atoms.losses / interval).astype(np.int64)
    above = np.clip(atoms.losses - index * interval, 0.0, interval)
    upper = np.minimum(np.expm1(-above) / math.expm1(-interval), 1.0)
    first = int(index.min())
    size = int(index.max()) - first + 2
    probabilities = np.zeros(size)
    np.add.at(probabilities, index - first, atoms.masses * (1 - upper))
    np.add.at(probabilities, index - first + 1, atoms.masses * upper)
    return first, probabilities


def _compose(counts: list[tuple[Loss, int]]) -> _Composed:
    interval = _interval(counts)
    heap: list[tuple[int, int, pld_pmf.PLDPmf]] = []  # smallest first: long convolutions happen once
    order = itertools.count()
    work = 0.0
    for loss, count in counts:
        atoms = loss.atoms(interval)
        first, probabilities = connect_the_dots(atoms, interval)
        work += (count + 3) * float(np.linalg.norm(probabilities))
        law = pld_pmf.DensePLDPmf(interval, first, probabilities, atoms.infinite, True)
        if count > 1:
            law = law.self_compose(count, _TAIL)
        heapq.heappush(heap, (law.size, next(order), law))
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        law = pld_pmf.compose_pmfs(one, other, _TAIL)
        heapq.heappush(heap, (law.size, next(order), law))
    law = heap[0][2]
    # A transform of length N errs by a few log₂N unit roundoffs of the 2-norm (Higham 2002, Theorem 24.2); a sum over
    # M points by √M times that. See docs/privacy.md on rounding.
    per_transform = 16 * _UNIT_ROUNDOFF * math.log2(law.size + 2)
    return _Composed(law, per_transform * math.sqrt(law.size) * work)


def _interval(counts: list[tuple[Loss, int]]) -> float:
    """The farthest loss over a power of two: an atom there (n = 1, selections) stays where it is."""
    total = sum(count for _, count in counts)
    variance = math.fsum(count * loss.standard_deviation**2 for loss, count in counts)
    widest = max(loss.window[1] - loss.window[0] for loss, _ in counts)
    farthest = max(max(abs(end) for end in loss.window) for loss, _ in counts)
    resolution = min(_RESOLUTION / math.sqrt(total), _SUM_RESOLUTION)
    wanted = max(resolution * math.sqrt(variance), widest / _MOST_POINTS, farthest / _LARGEST_INDEX)
    return math.ldexp(farthest, -math.ceil(math.log2(farthest / wanted)))
