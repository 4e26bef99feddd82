"""Batched sanitizing: the deployed mechanism's numbers for its draws, and its law for its own draws."""

import numpy as np
import pytest
from scipy import stats

from coterie.mechanisms.layerwise import FixedNeighbourhood, LayerwiseLaplace, RelativeNeighbourhood
from coterie.rng import seeded
from coterie.simulation.sanitizing import BatchSanitizer, draw, finite_updates, sent_vectors
from tests.simulation.conftest import ReplayedNoise

SIZES = (8, 3, 1)
ALPHA = 1e-9


def mechanisms(kind: str, clients: int) -> list[LayerwiseLaplace]:
    """Two runs' clients in turn, with their own ν and lengths."""
    made = []
    for index in range(clients):
        nu, lengths = (3.0, (0.5, 0.2, 0.1)) if index % 2 else (0.7, (0.05, 0.02, 3.0))
        neighbourhood = FixedNeighbourhood(lengths) if kind == "fixed" else RelativeNeighbourhood(lengths)
        made.append(LayerwiseLaplace(SIZES, nu, neighbourhood))
    return made


@pytest.mark.parametrize("kind", ["fixed", "relative"])
def test_the_numbers_are_the_deployed_mechanisms(kind: str) -> None:
    clients = 400
    each = mechanisms(kind, clients)
    updates = 10.0 ** seeded(1).uniform(-4, 2, (clients, 1)) * seeded(2).standard_normal((clients, sum(SIZES)))
    updates[0] = 0.0
    updates[1, :8] = [0.5, *[0.0] * 7]  # exactly on the sphere
    normals, gammas = draw(SIZES, clients, rng=seeded(3))
    found = BatchSanitizer(each)(updates, normals, gammas)
    same = 0
    for index, mechanism in enumerate(each):
        released = mechanism.release(updates[index], rng=ReplayedNoise(normals[index], gammas[index]))
        for layer, own in enumerate((slice(0, 8), slice(8, 11), slice(11, 12))):
            noise = released.event.layers[layer]
            # The last bit of a norm may move a number across the middle between two multiples of the grid.
            grid = 2.0 ** (np.floor(np.log2(np.sqrt(noise.dimension + 1) / noise.epsilon)) - 20)
            gap = np.abs(found[index, own] - released.update[own])
            assert gap.max() <= 1.01 * grid
            assert np.array_equal(np.rint(found[index, own] / grid) * grid, found[index, own])
            same += np.array_equal(found[index, own], released.update[own])
    assert same > 0.99 * 3 * clients


def test_the_law_is_the_mechanisms() -> None:
    """Radius Gamma(n_l, scale ν·C_l/n_l), by Kolmogorov-Smirnov and by its sum; direction uniform on the sphere."""
    clients = 20_000
    nu, radii = 3.0, (0.5, 0.2, 0.1)
    batch = BatchSanitizer([LayerwiseLaplace(SIZES, nu, FixedNeighbourhood(radii))] * clients)
    noise = batch(np.zeros((clients, sum(SIZES))), *draw(SIZES, clients, rng=seeded(20220604, "law")))

    def radius_p_values(lengths: np.ndarray, size: int, scale: float) -> tuple[float, float]:  # type: ignore[type-arg]
        total = stats.gamma(size * clients, scale=scale)
        tail = 2 * min(total.cdf(lengths.sum()), total.sf(lengths.sum()))
        return float(stats.kstest(lengths, stats.gamma(size, scale=scale).cdf).pvalue), float(tail)

    for size, radius, own in zip(SIZES, radii, (slice(0, 8), slice(8, 11), slice(11, 12)), strict=True):
        lengths = np.linalg.norm(noise[:, own], axis=1)
        scale = nu * radius / size
        assert min(radius_p_values(lengths, size, scale)) > ALPHA
        for wrong in (1.1 * scale, scale / 1.1):  # negative controls through the same helper
            assert min(radius_p_values(lengths, size, wrong)) < ALPHA
        assert min(radius_p_values(lengths, size + 1, scale)) < ALPHA
        if size > 1:
            first = (noise[:, own][:, 0] / lengths + 1) / 2
            half = (size - 1) / 2
            assert stats.kstest(first, stats.beta(half, half).cdf).pvalue > ALPHA
            assert stats.kstest(first, stats.beta(half + 1, half + 1).cdf).pvalue < ALPHA


def test_layers_and_clients_draw_on_their_own() -> None:
    normals, gammas = draw(SIZES, 20_000, rng=seeded(9))
    together = np.corrcoef(np.concatenate([normals, gammas], axis=1).T)
    off = together[~np.eye(len(together), dtype=bool)]
    # A correlation of independent numbers is about N(0, 1/20,000): 6.5 standard deviations.
    assert np.abs(off).max() < 6.5 / np.sqrt(20_000)


def test_a_direction_of_zeros_gives_no_noise_instead_of_nan() -> None:
    batch = BatchSanitizer([LayerwiseLaplace((2,), 1.0, FixedNeighbourhood((1.0,)))])
    assert batch(np.zeros((1, 2)), np.zeros((1, 2)), np.ones((1, 1))).tolist() == [[0.0, 0.0]]


def test_diverged_training_is_the_zero_update_and_what_is_sent_stays_in_float32() -> None:
    starts = np.ones((3, 2), np.float32)
    trained = np.array([[2.0, 3.0], [np.nan, 5.0], [np.inf, 5.0]], np.float32)
    assert finite_updates(starts, trained).tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    limit = float(np.finfo(np.float32).max)
    sent = sent_vectors(starts, np.array([[1e300, -1e300], [0.5, 0.0], [0.0, 0.0]]))
    assert sent.dtype == np.float32
    assert sent.tolist() == [[limit, -limit], [1.5, 1.0], [1.0, 1.0]]
