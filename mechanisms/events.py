"""Frozen records of what was released. Accountants price them elsewhere; a record never holds a price."""

from dataclasses import dataclass
from enum import StrEnum


class Neighbourhood(StrEnum):
    """Which data sets a release's guarantee compares.

    ``FIXED``: the update was clipped to a public radius, so the noise does not depend on the data (d-private).
    ``RELATIVE``: the noise was scaled by the private update itself, as the paper does (not d-private).
    """

    FIXED = "fixed"
    RELATIVE = "relative"


@dataclass(frozen=True, slots=True)
class Noise:
    """One vector to which n-dimensional L2 Laplace noise was added.

    The noise density is proportional to exp(-ε‖x‖₂) on Rⁿ; ε is per unit of Euclidean distance. ``radius`` (r) is
    the distance up to which the release was meant to hide the true vector, so that ε·r is its price.
    """

    dimension: int
    epsilon: float
    radius: float


@dataclass(frozen=True, slots=True)
class UpdateRelease:
    """One sanitized update that left, layer by layer (a whole-vector release has a single layer)."""

    neighbourhood: Neighbourhood
    layers: tuple[Noise, ...]


@dataclass(frozen=True, slots=True)
class GaussianRelease:
    """One vector to which isotropic Gaussian noise was added: N(0, σ²I), hiding up to L2 distance ``radius``."""

    dimension: int
    sigma: float
    radius: float


@dataclass(frozen=True, slots=True)
class SelectionRelease:
    """One hypothesis index that left after a mechanism with pure local privacy loss at most ``epsilon``."""

    mechanism: str
    hypotheses: int
    epsilon: float


ReleaseEvent = UpdateRelease | GaussianRelease | SelectionRelease


@dataclass(frozen=True, slots=True)
class LabelRelease:
    """One release that hides labels only: (``epsilon``, ``delta``) label differential privacy.

    Its neighbours are two data sets with equal features that differ in the label of one example. That is another
    relation than the one of the releases above, so a label release is never priced together with them. An infinite
    ``epsilon`` records a release without a guarantee.

    Releases on disjoint sets of examples compose in parallel. ``partition`` names a division of the examples into
    disjoint parts that was fixed without looking at labels, and ``part`` is the one whose labels this release used;
    the empty name is the division into a single part, all examples. ``examples`` is how many labels were used.
    """

    mechanism: str
    examples: int
    epsilon: float
    delta: float = 0.0
    partition: str = ""
    part: int = 0
