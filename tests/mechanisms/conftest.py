"""Both sources of randomness, reproducibly: the statistical tests hold for the one and for the other."""

import numpy as np
import pytest
from hypothesis import settings

from coterie import rng
from coterie.mechanisms.randomness import NoiseSource

settings.register_profile("no deadline", deadline=None)  # no test asserts a time
settings.load_profile("no deadline")


class ReplayedEntropy(rng.SecureGenerator):
    """The secure generator on keys that repeat: what only a test may have."""

    __slots__ = ("_keys",)

    def __init__(self, seed: int) -> None:
        self._keys = np.random.default_rng(seed)

    def _entropy(self, count: int) -> bytes:
        return self._keys.bytes(count)


@pytest.fixture
def replayed() -> NoiseSource:
    return ReplayedEntropy(1)


@pytest.fixture(scope="module", params=["seeded", "secure"])
def source(request: pytest.FixtureRequest) -> NoiseSource:
    return rng.seeded(20220604, "law") if request.param == "seeded" else ReplayedEntropy(20220604)
