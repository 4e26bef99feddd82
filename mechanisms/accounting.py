"""What recorded releases cost. Prices are computed from frozen events and are never stored beside them."""

import math
from collections.abc import Iterable, Iterator

from .events import GaussianRelease, Noise, ReleaseEvent, SelectionRelease, UpdateRelease


def pure_loss(events: Iterable[ReleaseEvent]) -> float:
    """Composed pure d-privacy loss Σ_t Σ_l ε_{t,l}·r_{t,l} at the recorded distances, plus the ε of each selection.

    Bounds |ln P(transcript | Z)/P(transcript | Z')| for two data sets whose true vectors stay within the recorded
    radius r_{t,l} of each other in every layer of every release, whatever the releases chose from earlier ones.
    The sum is correctly rounded (``math.fsum``), so it does not depend on the order of the events. No events cost 0;
    Gaussian noise has no finite pure loss, so that one such release makes the answer infinite.

    Raises ``ValueError`` for an event of unknown type or with impossible numbers.
    """
    return math.fsum(term for event in events for term in _pure_terms(event))


def _pure_terms(event: ReleaseEvent) -> Iterator[float]:
    check(event)
    match event:
        case UpdateRelease():
            yield from (noise.epsilon * noise.radius for noise in event.layers)
        case SelectionRelease():
            yield event.epsilon
        case GaussianRelease():
            yield math.inf if event.radius > 0 else 0.0


def check(event: ReleaseEvent) -> None:
    """Raise ``ValueError``, naming argument and value, unless ``event`` is of a known type with possible numbers."""
    match event:
        case UpdateRelease():
            if not event.layers:
                raise ValueError("Expected an update release with at least one layer, found none")
            for noise in event.layers:
                _check_noise(noise)
        case GaussianRelease():
            _check_dimension(event.dimension)
            _check_positive("sigma", event.sigma)
            _check_distance("radius", event.radius)
        case SelectionRelease():
            if event.hypotheses < 1:
                raise ValueError(f"Expected hypotheses >= 1, found {event.hypotheses}")
            _check_distance("epsilon", event.epsilon)
        case _:
            raise ValueError(f"Expected a release event of a known type, found {type(event).__name__}")


def _check_noise(noise: Noise) -> None:
    _check_dimension(noise.dimension)
    _check_positive("epsilon", noise.epsilon)
    _check_distance("radius", noise.radius)


def _check_dimension(dimension: int) -> None:
    if dimension < 1:
        raise ValueError(f"Expected dimension >= 1, found {dimension}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"Expected {name} > 0 and finite, found {value}")


def _check_distance(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"Expected {name} >= 0 and finite, found {value}")
