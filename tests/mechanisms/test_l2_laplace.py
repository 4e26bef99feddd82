"""The closed forms of ``L2Laplace`` against golden values and independent computations; its edges and errors."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import integrate, stats

from coterie import rng
from coterie.mechanisms.events import Neighbourhood, Noise, UpdateRelease
from coterie.mechanisms.l2_laplace import L2Laplace

LENGTHS = st.floats(-1e3, 1e3, allow_subnormal=False)
EPSILONS = st.floats(1e-3, 1e3)


def log_constant(dimension: int, epsilon: float) -> float:
    centre = np.zeros(dimension)
    return L2Laplace(dimension, epsilon).log_density(centre, centre)


# papers.md, part (a), Lemma 1.
@pytest.mark.parametrize(("dimension", "constant"), [(1, 0.5), (2, 1 / (2 * math.pi)), (3, 1 / (8 * math.pi))])
def test_the_density_constant_in_low_dimensions(dimension: int, constant: float) -> None:
    assert math.exp(log_constant(dimension, 1.0)) == pytest.approx(constant, rel=1e-14)


def test_the_log_density_constant_in_high_dimensions() -> None:
    assert log_constant(11, 2.0) == pytest.approx(-10.5111412, abs=5e-8)
    assert log_constant(1_206_590, 1.0) == pytest.approx(-8953613.548, abs=5e-4)


@pytest.mark.parametrize("dimension", [1, 2, 3, 11])
def test_the_density_integrates_to_one(dimension: int) -> None:
    mechanism = L2Laplace(dimension, 1.7)
    centre = np.zeros(dimension)

    def shell(radius: float) -> float:
        point = np.zeros(dimension)
        point[0] = radius
        area = 2 * math.pi ** (dimension / 2) / math.gamma(dimension / 2) * radius ** (dimension - 1)
        return area * math.exp(mechanism.log_density(point, centre))

    assert integrate.quad(shell, 0, 60)[0] == pytest.approx(1.0, rel=1e-8)


@given(st.data(), st.integers(1, 40), EPSILONS)
def test_the_density_ratio_is_within_the_privacy_loss(data: st.DataObject, dimension: int, epsilon: float) -> None:
    vectors = arrays(np.float64, dimension, elements=LENGTHS)
    output, first, second = data.draw(vectors), data.draw(vectors), data.draw(vectors)
    mechanism = L2Laplace(dimension, epsilon)
    one, other = mechanism.log_density(output, first), mechanism.log_density(output, second)
    bound = mechanism.privacy_loss(math.sqrt(math.fsum((first - second) ** 2)))
    rounding = 1e-12 * (abs(one) + abs(other) + 1)
    assert abs(one - other) <= bound + rounding


@given(st.integers(1, 40), EPSILONS, st.floats(0.1, 100))
def test_the_privacy_loss_is_attained(dimension: int, epsilon: float, distance: float) -> None:
    # On the line through both inputs, beyond one of them, the triangle inequality is an equality.
    mechanism = L2Laplace(dimension, epsilon)
    first, second, output = np.zeros((3, dimension))
    second[0], output[0] = distance, -1.0
    loss = mechanism.log_density(output, first) - mechanism.log_density(output, second)
    assert loss == pytest.approx(mechanism.privacy_loss(distance), rel=1e-6)


def test_moments_are_those_of_the_paper() -> None:
    mechanism = L2Laplace(11, 2.0)
    assert mechanism.component_variance == pytest.approx(12 / 4, rel=1e-14)  # Section 4.2: (n + 1)/ε²
    assert mechanism.mean_norm == 5.5
    # E‖ρ‖² = n·Var(ρ_i) must be Var‖ρ‖ + (E‖ρ‖)² = n/ε² + n²/ε² of the Gamma radius.
    assert 11 * mechanism.component_variance == pytest.approx(11 / 4 + 5.5**2, rel=1e-14)


@pytest.mark.parametrize("dimension", [1, 11, 1_200_000])
@pytest.mark.parametrize("probability", [0.001, 0.5, 0.999])
def test_norm_quantiles_invert_the_radial_law(dimension: int, probability: float) -> None:
    quantile = L2Laplace(dimension, 3.0).norm_quantile(probability)
    assert stats.gamma(dimension, scale=1 / 3).cdf(quantile) == pytest.approx(probability, rel=1e-8)


def test_the_ends_of_the_norm_quantiles() -> None:
    assert L2Laplace(2, 1.0).norm_quantile(0) == 0
    assert L2Laplace(2, 1.0).norm_quantile(1) == math.inf


def test_privacy_loss_at_the_ends() -> None:
    assert L2Laplace(2, 3.0).privacy_loss(0) == 0
    assert L2Laplace(2, 3.0).privacy_loss(2) == 6
    assert L2Laplace(2, 3.0).privacy_loss(math.inf) == math.inf


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (1, 3, 2)])
def test_any_shape_and_precision(dtype: type, shape: tuple[int, ...]) -> None:
    x = np.full(shape, 1e9, dtype)
    before = x.copy()
    noisy = L2Laplace(x.size, 1.0)(x, rng=rng.seeded(1))
    assert noisy.shape == shape
    assert noisy.dtype == np.float64
    assert np.all(noisy != 1e9)
    assert np.all(np.abs(noisy - 1e9) < 1e3)
    assert np.array_equal(x, before)


def test_the_transposed_array_keeps_its_places() -> None:
    x = np.arange(6.0).reshape(2, 3).T * 1e6
    assert np.allclose(L2Laplace(6, 1.0)(x, rng=rng.seeded(1)), x, atol=100)


def test_chunks_make_one_vector() -> None:
    # More coordinates than a chunk: every part is noised, at the one common radius.
    n = 200_001
    noise = L2Laplace(n, 1.0)(np.zeros(n), rng=rng.seeded(2))
    parts = [float(np.std(part)) for part in np.array_split(noise, 7)]
    assert np.allclose(parts, math.sqrt(n + 1), rtol=0.05)


@given(st.integers(1, 2000), st.floats(1e-6, 1e6), st.floats(-1e6, 1e6))
def test_outputs_are_on_the_public_grid(dimension: int, epsilon: float, x: float) -> None:
    mechanism = L2Laplace(dimension, epsilon)
    assert math.frexp(mechanism.grid)[0] == 0.5  # a power of two
    deviation = math.sqrt(mechanism.component_variance)
    assert deviation * 2.0**-21 < mechanism.grid <= deviation * 2.0**-20 * (1 + 1e-12)
    steps = mechanism(np.full(dimension, x), rng=rng.seeded(1, dimension)) / mechanism.grid
    assert np.array_equal(steps, np.rint(steps))


def test_rounding_is_to_the_nearest_and_not_coarser() -> None:
    # The same draws, with an input that is not on the grid: consecutive multiples occur, so the grid is not coarser.
    mechanism = L2Laplace(100_000, 1e3)
    steps = np.unique(mechanism(np.full(100_000, 0.3), rng=rng.seeded(1)) / mechanism.grid)
    assert np.diff(steps).min() == 1


class ZerosFirst:
    """A source whose first vector of normals has no direction."""

    def __init__(self) -> None:
        self.generator = rng.seeded(1)
        self.fills = 0

    def random(self) -> float:
        return self.generator.random()

    def standard_normal(self, *, out: np.ndarray) -> np.ndarray:
        self.fills += 1
        out[:] = 0.0 if self.fills == 1 else self.generator.standard_normal(out.size)
        return out

    def standard_gamma(self, shape: float) -> float:
        return self.generator.standard_gamma(shape)


def test_a_draw_without_a_direction_is_drawn_again() -> None:
    source = ZerosFirst()
    assert np.all(L2Laplace(3, 1.0)(np.zeros(3), rng=source) != 0)
    assert source.fills == 2


def test_memory_beyond_the_result_is_bounded() -> None:
    n = 4_000_000
    x = np.zeros(n, np.float32)
    mechanism = L2Laplace(n, 1.0)
    tracemalloc.start()
    try:
        noisy = mechanism(x, rng=rng.secure())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < noisy.nbytes + 4_000_000


def test_the_record_of_a_release() -> None:
    assert L2Laplace(3, 2.0).event(0.5) == UpdateRelease(Neighbourhood.FIXED, (Noise(3, 2.0, 0.5),))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: L2Laplace(0, 1.0), "dimension .* found 0"),
        (lambda: L2Laplace(2.5, 1.0), "dimension .* found 2.5"),
        (lambda: L2Laplace(2, 0.0), "epsilon > 0 and finite, found 0.0"),
        (lambda: L2Laplace(2, -1.0), "epsilon > 0 and finite, found -1.0"),
        (lambda: L2Laplace(2, math.nan), "epsilon > 0 and finite, found nan"),
        (lambda: L2Laplace(2, math.inf), "epsilon > 0 and finite, found inf"),
        (lambda: L2Laplace(2, 1e-200), "epsilon .* found 1e-200"),
        (lambda: L2Laplace(2, 1e200), r"epsilon .* found 1e\+200"),
        (lambda: L2Laplace(2, 1.0).privacy_loss(-1.0), "distance >= 0, found -1.0"),
        (lambda: L2Laplace(2, 1.0).privacy_loss(math.nan), "distance >= 0, found nan"),
        (lambda: L2Laplace(2, 1.0).norm_quantile(1.5), "probability .* found 1.5"),
        (lambda: L2Laplace(2, 1.0).event(0.0), "radius > 0 and finite, found 0.0"),
        (lambda: L2Laplace(2, 1.0)(np.zeros(3), rng=rng.seeded(1)), "x to hold 2 numbers, found 3"),
        (lambda: L2Laplace(2, 1.0)(np.zeros(0), rng=rng.seeded(1)), "x to hold 2 numbers, found 0"),
        (lambda: L2Laplace(2, 1.0)([1.0, math.nan], rng=rng.seeded(1)), "x to be finite, found nan"),
        (lambda: L2Laplace(2, 1.0)([-math.inf, 0.0], rng=rng.seeded(1)), "x to be finite, found -inf"),
        (lambda: L2Laplace(2, 1.0)([1j, 0], rng=rng.seeded(1)), "x to hold real numbers, found dtype complex128"),
        (lambda: L2Laplace(1, 1e140)([1e300], rng=rng.seeded(1)), "fit in float64"),
        (lambda: L2Laplace(2, 1.0).log_density([0.0], [0.0, 0.0]), "x to hold 2 numbers, found 1"),
        (lambda: L2Laplace(2, 1.0).log_density([0.0, 0.0], [0.0, math.nan]), "centre to be finite"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        act()
    assert "\n" not in str(error.value)
