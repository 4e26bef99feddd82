"""From a target to the parameters that meet it. What is returned always meets the target, and hardly more."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from scipy import special

from coterie.mechanisms.accounting import Accountant, expect_delta, pure_loss
from coterie.mechanisms.arguments import expect_count, expect_positive
from coterie.mechanisms.events import Neighbourhood, Noise, ReleaseEvent, UpdateRelease
from coterie.mechanisms.privacy_loss import GaussianLoss

MOST_ROUNDS = 100_000
"""The most rounds that ``rounds_left`` looks for in (ε, δ) terms: this answer means at least so many."""

BUDGET_ROUNDING = 1e-12
"""Relative: a total may pass a budget by float rounding, so that six releases of 11/3 fit into 22."""

_NOISE_TOLERANCE = 1e-4  # relative, of a noise multiplier


@dataclass(frozen=True, slots=True)
class NoiseMultipliers:
    """The noise multiplier ν that meets one ε, for each of the four prices of ``accounting.Price``."""

    pure: float
    tight: float
    local_pure: float
    local_tight: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """L2 Laplace beside Gaussian noise with the same mean norm νC per layer and release, for the same rounds.

    ``laplace`` and ``gaussian`` are the (ε, δ) prices within the radius. ``gaussian_noise_multiplier`` is the mean
    norm over C at which Gaussian noise would cost ``laplace``. Gaussian noise has no pure price.
    """

    noise_multiplier: float
    laplace: float
    gaussian: float
    gaussian_noise_multiplier: float


def planned_release(layers: Sequence[int], noise_multiplier: float) -> UpdateRelease:
    """A fixed-neighbourhood release of ``layers`` (n_l) at the noise multiplier ν, in units of each layer's radius.

    ε_l = n_l/ν per radius, so that the mean norm of a layer's noise is ν radii, and the layer's price n_l/ν.
    """
    if not layers:
        raise ValueError("Expected layers to hold at least one size, found none")
    for size in layers:
        expect_count("layer size", size)
    expect_positive("noise_multiplier", noise_multiplier)
    return UpdateRelease(Neighbourhood.FIXED, tuple(Noise(size, size / noise_multiplier, 1.0) for size in layers))


def planned_ledger(*, layers: Sequence[int], noise_multiplier: float, rounds: int) -> Accountant:
    """A ledger of ``rounds`` planned releases. Raises ``ValueError`` for sizes or rounds below 1 and a bad ν."""
    expect_count("rounds", rounds)
    accountant = Accountant()
    accountant.add([planned_release(layers, noise_multiplier)], times=rounds)
    return accountant


def noise_multipliers(*, epsilon: float, delta: float, rounds: int, layers: Sequence[int]) -> NoiseMultipliers:
    """The smallest ν, to a relative 1e-4 and from above, at which ``rounds`` fixed releases cost at most ``epsilon``.

    The price at the returned ν, as ``accounting`` computes it, never passes ``epsilon``. Raises ``ValueError`` for
    ε ≤ 0, δ outside (0, 1), rounds or layer sizes below 1.
    """
    expect_positive("epsilon", epsilon)
    expect_delta(delta)
    expect_count("rounds", rounds)

    def plan(noise_multiplier: float) -> Accountant:
        return planned_ledger(layers=layers, noise_multiplier=noise_multiplier, rounds=rounds)

    planned_release(layers, 1.0)  # what is wrong with the sizes is said first
    pure = _at_least(rounds * sum(layers) / epsilon, lambda nu: plan(nu).pure <= epsilon)
    guess = _smallest(pure, lambda nu: plan(nu).gaussian_limit(delta=delta) <= epsilon)
    tight = _smallest(min(guess, pure), lambda nu: plan(nu).tight(delta=delta) <= epsilon)
    # Twice the distance at twice ν is the same loss, to the last bit.
    return NoiseMultipliers(pure=pure, tight=tight, local_pure=2 * pure, local_tight=2 * tight)


def rounds_left(
    *, budget: float, release: Sequence[ReleaseEvent], spent: Iterable[ReleaseEvent] = (), delta: float | None = None
) -> int:
    """How often ``release`` can still be made after ``spent`` within ``budget``; 0 if the budget is already passed.

    Without ``delta`` the budget is on the pure loss, exact up to ``BUDGET_ROUNDING``. With it, the budget is on the
    (ε, δ) price within the radius, and the answer is at most ``MOST_ROUNDS``. Raises ``ValueError`` for a budget
    that is not positive, a δ outside (0, 1), and a release that costs nothing.
    """
    expect_positive("budget", budget)
    events = list(spent)
    if pure_loss(release) == 0:
        raise ValueError("Expected a release that costs something, found one with a loss of 0")
    if delta is None:
        before, each = pure_loss(events), pure_loss(release)
        if math.isinf(before) or math.isinf(each):
            return 0
        room = Fraction(budget) * (1 + Fraction(BUDGET_ROUNDING)) - Fraction(before)
        return max(0, math.floor(room / Fraction(each)))

    def fits(rounds: int) -> bool:
        accountant = Accountant()
        accountant.add(events)
        accountant.add(release, times=rounds)
        return accountant.tight(delta=delta) <= budget

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_ROUNDS and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST_ROUNDS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_radius(*, epsilon: float, delta: float, rounds: int, dimension: int, noise_epsilon: float) -> float:
    """The largest distance r, from below, that ``rounds`` releases hide at the (ε, δ) price ``epsilon``.

    The noise is n-dimensional L2 Laplace with rate ``noise_epsilon`` per unit of distance. Two data sets whose true
    vectors are within r in every release are (``epsilon``, ``delta``) indistinguishable. Raises ``ValueError`` like
    ``noise_multipliers``, and for a rate that is not positive.
    """
    expect_positive("noise_epsilon", noise_epsilon)
    needed = noise_multipliers(epsilon=epsilon, delta=delta, rounds=rounds, layers=[dimension]).tight
    return math.nextafter(dimension / needed / noise_epsilon, 0.0)


def compare_with_gaussian(*, noise_multiplier: float, delta: float, rounds: int, layers: Sequence[int]) -> Comparison:
    """What ``rounds`` releases cost with L2 Laplace and with Gaussian noise of the same mean norm.

    A standard normal vector in Rⁿ has the mean norm m_n = √2·Γ((n+1)/2)/Γ(n/2), so σ = νC/m_n and μ² adds up to
    rounds·Σ_l (m_{n_l}/ν)². Raises ``ValueError`` like ``noise_multipliers``.
    """
    plan = planned_ledger(layers=layers, noise_multiplier=noise_multiplier, rounds=rounds)
    laplace = plan.tight(delta=delta)
    norm = math.sqrt(rounds * math.fsum(mean_normal_norm(size) ** 2 for size in layers))
    return Comparison(
        noise_multiplier=noise_multiplier,
        laplace=laplace,
        gaussian=GaussianLoss(norm / noise_multiplier).epsilon(delta),
        gaussian_noise_multiplier=_smallest(
            noise_multiplier, lambda nu: GaussianLoss(norm / nu).epsilon(delta) <= laplace
        ),
    )


def mean_normal_norm(dimension: int) -> float:
    """E‖z‖₂ = √2·Γ((n+1)/2)/Γ(n/2) for a standard normal z in Rⁿ."""
    expect_count("dimension", dimension)
    return math.sqrt(2) * math.exp(special.gammaln((dimension + 1) / 2) - special.gammaln(dimension / 2))


def _at_least(start: float, meets: Callable[[float], bool]) -> float:
    """The first float from ``start`` on that ``meets`` a target which only rounding can make it miss."""
    value = start
    while not meets(value):
        value = math.nextafter(value, math.inf)
    return value


def _smallest(start: float, meets: Callable[[float], bool]) -> float:
    """The smallest value, from above and to a relative tolerance, that ``meets`` a target which larger ones meet."""
    low = high = start
    step = 1.02
    while not meets(high):
        low, high, step = high, high * step, step * step
    while meets(low):
        low, high, step = low / step, low, step * step
    while high - low > _NOISE_TOLERANCE * high:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high
