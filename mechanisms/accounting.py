"""What recorded releases cost. Prices are computed from frozen events and are never stored beside them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from coterie.mechanisms.arguments import expect_count, expect_positive
from coterie.mechanisms.events import (
    GaussianRelease,
    LabelRelease,
    Neighbourhood,
    Noise,
    ReleaseEvent,
    SelectionRelease,
    UpdateRelease,
)
from coterie.mechanisms.labels.accounting import LabelAccountant, LabelPrice

if TYPE_CHECKING:
    from coterie.mechanisms.composition import Loss

# What the tight prices need is imported where it is used: dp_accounting takes a second and 80 MB, which a client that
# only adds up pure losses should not pay.

RELATIVE_NOTE = (
    "relative-mode releases are priced by the paper's heuristic: their noise is scaled by the private update itself, "
    "so no d-privacy, (epsilon, delta) or local guarantee follows"
)
GAUSSIAN_NOTE = "Gaussian noise has no finite pure loss: its price exists only together with a delta"
PURE_NOTE = "the (epsilon, delta) price cannot be computed at so small a delta or so little noise: it is the pure price"
LABELS_NOTE = (
    "label releases are priced apart: their guarantee compares data sets that differ in one label, so it is neither "
    "part of the other prices nor covered by them"
)

_MOST_KINDS = 128  # of different releases in one composition; beyond it, close distances are rounded up to meet
_SMALLEST_DISTANCE = 1e-15  # a smaller distance is priced as this one
_LARGEST_DISTANCE = 1e12  # beyond it the tight price is the pure one


@dataclass(frozen=True, slots=True)
class Price:
    """What some releases cost together, side by side.

    ``pure`` and ``tight`` compare two data sets whose true vectors stay within the recorded radius of each other, in
    every layer of every release; ``local_pure`` and ``local_tight`` compare any two data sets, as long as each
    release starts from the same public point for both (the same hypothesis): two updates clipped to the radius r are
    at most 2r apart. The pure prices bound the log-ratio of any transcript's probabilities, the tight ones are the
    smallest ε, rounded up, at which all the releases are (ε, ``delta``) indistinguishable. Infinite means: no bound.

    The pure prices hold for what happened, however later releases depended on earlier ones; the tight prices hold
    for a plan whose noise and most releases were fixed beforehand (docs/privacy.md). Unless ``formal``, the ledger
    holds releases for which none of this is a guarantee: ``notes`` say which.

    ``labels`` is the price of the label releases, None if there are none. It compares data sets that differ in one
    label, and is a guarantee beside the others, never a part of them: ``releases``, the four prices and ``formal`` are
    about all other releases only, and bound nothing of what the label releases show. Nor does ``labels`` cover the
    other releases: an update that was trained on the labels themselves shows them too.
    """

    releases: int
    delta: float
    pure: float
    tight: float
    local_pure: float
    local_tight: float
    formal: bool
    notes: tuple[str, ...]
    labels: LabelPrice | None = None


def pure_loss(events: Iterable[ReleaseEvent]) -> float:
    """Composed pure d-privacy loss Σ_t Σ_l ε_{t,l}·r_{t,l} at the recorded distances, plus the ε of each selection.

    Bounds |ln P(transcript | Z)/P(transcript | Z')| for two data sets whose true vectors stay within the recorded
    radius r_{t,l} of each other in every layer of every release, however the releases were chosen from earlier ones.
    The sum is correctly rounded (``math.fsum``), so it does not depend on the order of the events. No events cost 0;
    Gaussian noise has no finite pure loss, so that one such release makes the answer infinite.

    Raises ``ValueError`` for an event of unknown type or with impossible numbers, and for a label release, whose
    guarantee compares other data sets: ``labels.accounting`` prices it.
    """
    return math.fsum(term for event in events for term in _pure_terms(check(event)))


def price(events: Iterable[ReleaseEvent | LabelRelease], *, delta: float) -> Price:
    """All prices of ``events`` at ``delta``. Raises ``ValueError`` for a bad event, and for δ outside (0, 1)."""
    accountant = Accountant()
    accountant.add(events)
    return accountant.price(delta=delta)


class Accountant:
    """A growing ledger's prices. Equal releases are counted, not listed, so that another round is priced at once."""

    def __init__(self) -> None:
        """An empty ledger."""
        self._releases = 0
        self._relative = 0
        self._pure: Counter[float] = Counter()
        self._selections: Counter[float] = Counter()
        self._noise: Counter[tuple[int, float]] = Counter()  # (n, D)
        self._responses: Counter[tuple[int, float]] = Counter()  # (k, ε)
        self._gaussian: Counter[float] = Counter()  # μ²
        self._labels = LabelAccountant()

    def add(self, events: Iterable[ReleaseEvent | LabelRelease], *, times: int = 1) -> None:
        """Count ``events``, ``times`` times over. Raises ``ValueError`` for a bad one, and has then counted none."""
        expect_count("times", times, least=0)
        checked = [event if isinstance(event, LabelRelease) else check(event) for event in events]
        self._labels.add([event for event in checked if isinstance(event, LabelRelease)], times=times)
        for event in checked:
            self._releases += times * (not isinstance(event, LabelRelease))
            match event:
                case UpdateRelease():
                    self._relative += times * (event.neighbourhood is not Neighbourhood.FIXED)
                    for noise in event.layers:
                        distance = noise.epsilon * noise.radius
                        self._pure[distance] += times
                        self._noise[(noise.dimension, distance)] += times
                case SelectionRelease():
                    self._selections[event.epsilon] += times
                    self._responses[(_response_size(event), event.epsilon)] += times
                case GaussianRelease():
                    self._gaussian[(event.radius / event.sigma) ** 2] += times

    def price(self, *, delta: float) -> Price:
        """All prices of what was added, at ``delta``. Raises ``ValueError`` for δ outside (0, 1)."""
        expect_delta(delta)
        mu = math.sqrt(_exact_sum(self._gaussian))
        exact = _exact_sum(self._pure)
        selections = _exact_sum(self._selections)
        pure = self.pure
        local_pure = float(2 * exact + selections) if mu == 0 and not self._relative else math.inf
        composed = self._composed(1, delta)
        local_composed = self._composed(2, delta) if not self._relative else math.inf
        notes = [f"{self._relative} of {self._releases} releases: {RELATIVE_NOTE}"] if self._relative else []
        notes += [GAUSSIAN_NOTE] if mu > 0 else []
        notes += [PURE_NOTE] if math.isinf(composed) else []
        labels = self._labels.price()
        notes += [] if labels is None else [LABELS_NOTE, *labels.notes]
        return Price(
            releases=self._releases,
            delta=delta,
            pure=pure,
            tight=min(pure, composed),
            local_pure=local_pure,
            local_tight=min(local_pure, local_composed),
            formal=not self._relative,
            notes=tuple(notes),
            labels=labels,
        )

    @property
    def pure(self) -> float:
        """``Price.pure`` alone: the same number as ``pure_loss`` of the same events."""
        return math.inf if any(self._gaussian) else float(_exact_sum(self._pure) + _exact_sum(self._selections))

    def tight(self, *, delta: float) -> float:
        """``Price.tight`` alone, in half the time. Raises ``ValueError`` for δ outside (0, 1)."""
        expect_delta(delta)
        return min(self.pure, self._composed(1, delta))

    def gaussian_limit(self, *, delta: float) -> float:
        """The ε at ``delta`` of the limit for many dimensions: Gaussian noise with μ² = Σ D²/n, D = ε·r.

        For comparison only: at small n this is no bound on the exact price, neither from above nor from below.
        Raises ``ValueError`` for δ outside (0, 1) and for a ledger with selections, which have no dimension.
        """
        from coterie.mechanisms.privacy_loss import GaussianLoss

        expect_delta(delta)
        if self._responses:
            raise ValueError("Expected updates and Gaussian releases, found a selection: it has no Gaussian limit")
        parts = [distance / math.sqrt(n) * math.sqrt(count) for (n, distance), count in self._noise.items()]
        mu = math.hypot(*parts, math.sqrt(_exact_sum(self._gaussian)))
        if mu == 0:
            return 0.0
        return GaussianLoss(mu).epsilon(delta) if mu < _LARGEST_DISTANCE else math.inf

    def _composed(self, factor: int, delta: float) -> float:
        if 2 * max((distance for _, distance in self._noise), default=0.0) > _LARGEST_DISTANCE:
            return math.inf
        from coterie.mechanisms.composition import composed_epsilon

        return composed_epsilon(self._losses(factor), delta)

    def _losses(self, factor: int) -> "dict[Loss, int]":
        """The counted releases' losses at ``factor`` times the recorded distances."""
        from coterie.mechanisms.privacy_loss import GaussianLoss, L2LaplaceLoss, ResponseLoss

        losses: dict[Loss, int] = {}
        for (n, distance), count in _few_kinds(self._noise).items():
            losses[L2LaplaceLoss(n, max(factor * distance, _SMALLEST_DISTANCE))] = count
        for (k, epsilon), count in _few_kinds(self._responses).items():
            losses[ResponseLoss(k, max(epsilon, _SMALLEST_DISTANCE))] = count
        if (mu := factor * math.sqrt(_exact_sum(self._gaussian))) > 0:
            losses[GaussianLoss(max(mu, _SMALLEST_DISTANCE))] = 1
        return losses


def check(event: ReleaseEvent) -> ReleaseEvent:
    """``event`` itself. Raises ``ValueError``, naming argument and value, if its type or numbers are impossible."""
    match event:
        case UpdateRelease():
            if not event.layers:
                raise ValueError("Expected an update release with at least one layer, found none")
            for noise in event.layers:
                _check_noise(noise)
        case GaussianRelease():
            expect_count("dimension", event.dimension)
            expect_positive("sigma", event.sigma)
            _expect_finite("radius", event.radius)
            _expect_finite("radius over sigma, squared", (event.radius / event.sigma) ** 2)
        case SelectionRelease():
            expect_count("hypotheses", event.hypotheses)
            _expect_finite("epsilon", event.epsilon)
        case LabelRelease():
            raise ValueError("Expected a release under d-privacy, found a label release: price it apart")
        case _:
            raise ValueError(f"Expected a release event of a known type, found {type(event).__name__}")
    return event


def expect_delta(delta: float) -> None:
    """Raise ``ValueError`` unless 0 < δ < 1."""
    if not 0 < delta < 1:
        raise ValueError(f"Expected delta above 0 and below 1, found {delta}")


def _check_noise(noise: Noise) -> None:
    expect_count("dimension", noise.dimension)
    expect_positive("epsilon", noise.epsilon)
    _expect_finite("radius", noise.radius)
    _expect_finite("epsilon times radius", noise.epsilon * noise.radius)


def _expect_finite(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"Expected {name} >= 0 and finite, found {value}")


def _pure_terms(event: ReleaseEvent) -> Iterator[float]:
    match event:
        case UpdateRelease():
            yield from (noise.epsilon * noise.radius for noise in event.layers)
        case SelectionRelease():
            yield event.epsilon
        case GaussianRelease():
            yield math.inf if event.radius > 0 else 0.0


def _response_size(event: SelectionRelease) -> int:
    """k of the randomized response that dominates the selection: its own, or the worst case of any mechanism."""
    return max(2, event.hypotheses) if event.mechanism == "randomized-argmin" else 2


def _exact_sum(terms: Mapping[float, int]) -> Fraction:
    return sum((Fraction(term) * count for term, count in terms.items()), Fraction(0))


def _few_kinds(counts: Mapping[tuple[int, float], int]) -> Counter[tuple[int, float]]:
    """Counts by (size, distance) with distances rounded up so that few differ; zero distances cost nothing.

    Forty bits bring together what differs by float rounding alone. Fewer bits are used only for a ledger of very
    many different releases: a larger distance dominates, so a price can only rise.
    """
    for bits in (40, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1):
        kinds: Counter[tuple[int, float]] = Counter()
        for (size, distance), count in counts.items():
            if distance > 0:
                mantissa, exponent = math.frexp(distance)
                kinds[(size, math.ldexp(math.ceil(mantissa * 2**bits), exponent - bits))] += count
        if len(kinds) <= _MOST_KINDS:
            break
    return kinds
