"""Clipping: inside the ball in any arithmetic, a projection, and defined at the edges."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from coterie import rng
from coterie.mechanisms.neighbourhood import clip, euclidean_norm

MODERATE = arrays(np.float64, st.integers(1, 50), elements=st.floats(-1e6, 1e6))
ANY_FINITE = arrays(
    np.float64, st.integers(1, 50), elements=st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True)
)
RADII = st.floats(1e-6, 1e6)


def norms(vector: NDArray[np.float64]) -> list[float]:
    """The norm as evaluated exactly rounded, in order, in reverse order, pairwise and by BLAS."""
    squares = vector.ravel() * vector.ravel()
    in_order = float(np.cumsum(squares)[-1])
    reverse = float(np.cumsum(squares[::-1])[-1])
    sums = [math.fsum(squares), in_order, reverse, float(squares.sum()), float(np.dot(vector.ravel(), vector.ravel()))]
    return [math.sqrt(total) for total in sums]


@given(MODERATE, RADII)
def test_the_norm_is_within_the_radius_in_any_order_of_summation(update: NDArray[np.float64], radius: float) -> None:
    assert max(norms(clip(update, radius))) <= radius


@pytest.mark.parametrize("n", [1_000, 1_200_000])
@pytest.mark.parametrize("radius", [0.1, 1.0, 3.0])
def test_the_norm_is_within_the_radius_for_many_coordinates(n: int, radius: float) -> None:
    update = rng.seeded(1, n).standard_normal(n)
    clipped = clip(update, radius)
    assert max(norms(clipped)) <= radius
    assert max(norms(clipped)) >= radius * (1 - 1e-9)


def test_a_vector_whose_norm_is_the_radius_may_not_pass_by_rounding() -> None:
    # Vectors scaled to norm 1 by plain division: about half of them evaluate to just above 1.
    for seed in range(200):
        direction = rng.seeded(2, seed).standard_normal(7)
        assert max(norms(clip(direction / np.linalg.norm(direction), 1.0))) <= 1.0


@given(ANY_FINITE, st.floats(min_value=5e-324, max_value=1e300))
def test_it_is_defined_for_all_finite_vectors_and_radii(update: NDArray[np.float64], radius: float) -> None:
    clipped = clip(update, radius)
    assert np.isfinite(clipped).all()
    assert math.hypot(*clipped) <= radius
    assert np.all(clipped * np.sign(update) >= 0)  # no coordinate changes its sign


@given(ANY_FINITE, st.floats(min_value=5e-324, max_value=1e300))
def test_twice_is_once(update: NDArray[np.float64], radius: float) -> None:
    once = clip(update, radius)
    assert np.array_equal(clip(once, radius), once)


@given(MODERATE, RADII)
def test_a_vector_inside_is_unchanged_and_one_outside_keeps_its_direction(
    update: NDArray[np.float64], radius: float
) -> None:
    clipped = clip(update, radius)
    norm = math.sqrt(math.fsum(update**2))
    if norm <= radius * (1 - 1e-13):
        assert np.array_equal(clipped, update)
    elif norm >= radius * (1 + 1e-13):
        assert np.allclose(clipped, update * (radius / norm), rtol=1e-12, atol=1e-300)
        assert math.hypot(*clipped) >= radius * (1 - 1e-13)


@given(st.data(), st.integers(1, 20), RADII)
def test_two_vectors_never_move_apart(data: st.DataObject, dimension: int, radius: float) -> None:
    vectors = arrays(np.float64, dimension, elements=st.floats(-1e6, 1e6))
    one, other = data.draw(vectors), data.draw(vectors)
    apart = float(np.linalg.norm(one - other))
    assert float(np.linalg.norm(clip(one, radius) - clip(other, radius))) <= apart + 1e-12 * radius


def test_the_input_is_not_written_to_and_the_result_is_a_new_float64_array() -> None:
    for radius in (1.0, 100.0):
        for dtype in (np.float32, np.float64):
            update = np.full((2, 3), 4.0, dtype)
            update.setflags(write=False)
            clipped = clip(update, radius)
            assert clipped.shape == (2, 3)
            assert clipped.dtype == np.float64
            assert not np.shares_memory(clipped, update)


def test_the_edges() -> None:
    assert np.array_equal(clip(np.zeros(3), 2.0), np.zeros(3))
    assert np.array_equal(clip([3.0, 4.0], 10.0), [3.0, 4.0])
    assert clip([3.0, 4.0], 1.0) == pytest.approx([0.6, 0.8], rel=1e-14)
    assert clip([1.7e308, 1.7e308], 1.0) == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-14)  # its norm overflows
    assert clip([3e-200, 4e-200], 1e-200) == pytest.approx([0.6e-200, 0.8e-200], rel=1e-14)  # its squares underflow
    assert math.hypot(*clip(np.full(100, 1.0), 5e-324)) <= 5e-324  # one tenth of the radius is not a number


@pytest.mark.parametrize(
    ("update", "radius", "message"),
    [
        ([1.0], 0.0, "radius > 0 and finite, found 0.0"),
        ([1.0], -2.0, "radius > 0 and finite, found -2.0"),
        ([1.0], math.inf, "radius > 0 and finite, found inf"),
        ([1.0], math.nan, "radius > 0 and finite, found nan"),
        ([1.0, math.nan], 1.0, "update to be finite, found nan"),
        ([1.0, math.inf], 1.0, "update to be finite, found inf"),
        ([], 1.0, "update to hold at least one number, found 0"),
        (["a"], 1.0, "update to hold real numbers, found dtype"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(update: list[float], radius: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clip(update, radius)


@given(ANY_FINITE)
def test_the_norm_is_that_of_exact_arithmetic(vector: NDArray[np.float64]) -> None:
    assert euclidean_norm(vector) == pytest.approx(math.hypot(*vector), rel=1e-14, abs=1e-322)


def test_the_norm_of_several_chunks() -> None:
    assert euclidean_norm(np.full(250_000, 3.0, np.float32)) == pytest.approx(1500.0, rel=1e-14)
