"""Who trains and who validates: by a hash of each client's identity, the same in every run of a seed."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.rng import seeded


@dataclass(frozen=True)
class Roster:
    """A fixed split of the identities at a run's start; later ones fall on either side of the same threshold."""

    seed: int
    threshold: float  # identities whose position is below it validate

    @classmethod
    def split(cls, identities: Collection[str], fraction: float, seed: int) -> "Roster":
        """Hold out the ``round(fraction · N)`` identities of lowest position, but never all of them."""
        ordered = sorted(position(identity, seed) for identity in identities)
        held_out = min(round(fraction * len(ordered)), len(ordered) - 1)
        return cls(seed, ordered[held_out] if held_out > 0 else 0.0)

    def validates(self, identity: str) -> bool:
        """Whether this client is held out for validation."""
        return position(identity, self.seed) < self.threshold

    def sample(self, trainers: Iterable[str], size: int, round_number: int) -> list[str]:
        """``size`` trainers (or all, if there are fewer) without replacement, fixed by seed, round and set."""
        ordered = sorted(trainers, key=lambda identity: position(identity, self.seed))
        return [ordered[place] for place in sampled(len(ordered), size, self.seed, round_number)]


def sampled(trainers: int, size: int, seed: int, round_number: int) -> NDArray[np.int64]:
    """The places of ``size`` of ``trainers`` (or of all, if there are fewer), uniform without replacement."""
    chooser = seeded(seed, "sample", round_number)
    return chooser.choice(trainers, min(size, trainers), replace=False, shuffle=False)


def position(identity: str, seed: int) -> float:
    """A stable pseudo-random place in [0, 1) for an identity."""
    digest = hashlib.sha256(f"{seed}/{identity}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2.0**56
