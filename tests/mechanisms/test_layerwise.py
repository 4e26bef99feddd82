"""Layer-wise release: what is clipped, noised, recorded and charged."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie import rng
from coterie.mechanisms.events import Neighbourhood
from coterie.mechanisms.l2_laplace import L2Laplace
from coterie.mechanisms.layerwise import (
    FixedNeighbourhood,
    LayerwiseLaplace,
    RelativeNeighbourhood,
    split_radius,
)
from coterie.mechanisms.neighbourhood import clip

ALPHA = 1e-9
HOSPITAL = (6, 2, 2, 1)


def fixed(sizes: tuple[int, ...], noise_multiplier: float, *radii: float) -> LayerwiseLaplace:
    return LayerwiseLaplace(sizes, noise_multiplier, FixedNeighbourhood(radii))


def relative(sizes: tuple[int, ...], noise_multiplier: float, *floors: float) -> LayerwiseLaplace:
    return LayerwiseLaplace(sizes, noise_multiplier, RelativeNeighbourhood(floors))


def test_each_layer_is_clipped_to_its_radius_and_noised_by_its_own_mechanism() -> None:
    update = rng.seeded(1).standard_normal(11) * 10
    update[10] = 0.01  # the last layer is inside its radius
    radii = (1.0, 0.5, 2.0, 0.1)
    sanitized = fixed(HOSPITAL, 3.0, *radii).release(update, rng=rng.seeded(2))
    same = rng.seeded(2)
    parts = np.split(update, [6, 8, 10])
    expected = [
        L2Laplace(n, n / (3.0 * radius))(clip(part, radius), rng=same)
        for n, radius, part in zip(HOSPITAL, radii, parts, strict=True)
    ]
    assert np.array_equal(sanitized.update, np.concatenate(expected))
    assert sanitized.event.neighbourhood is Neighbourhood.FIXED
    for layer, n, radius in zip(sanitized.event.layers, HOSPITAL, radii, strict=True):
        assert (layer.dimension, layer.radius) == (n, radius)
        assert layer.epsilon == pytest.approx(n / (3.0 * radius), rel=1e-15)


@pytest.mark.parametrize("mode", ["fixed", "relative"])
def test_noise_to_signal_is_the_noise_multiplier(mode: str) -> None:
    # A layer's noise over ν·radius is Gamma(n)/n; the sum over m releases is Gamma(mn)/n.
    update = np.array([3.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.6, 0.8])  # norms 5 and 1
    build = fixed if mode == "fixed" else relative
    mechanism = build((6, 2), 2.5, 10.0, 1.0)
    centre = np.concatenate([clip(update[:6], 10.0), clip(update[6:], 1.0)])
    radius = {"fixed": (10.0, 1.0), "relative": (10.0, 1.0)}[mode]  # relative: the floor 10 is above the norm 5
    generator = rng.seeded(3, mode)
    totals = np.zeros(2)
    for _ in range(2000):
        noise = mechanism.release(update, rng=generator).update - centre
        totals += [np.linalg.norm(noise[:6]) / radius[0], np.linalg.norm(noise[6:]) / radius[1]]

    def p_value(total: float, n: int, noise_multiplier: float) -> float:
        law = stats.gamma(2000 * n, scale=noise_multiplier / n)
        return 2 * min(float(law.cdf(total)), float(law.sf(total)))

    for total, n in zip(totals, (6, 2), strict=True):
        assert p_value(float(total), n, 2.5) > ALPHA
        for wrong in (2.5 * 1.2, 2.5 / 1.2):
            assert p_value(float(total), n, wrong) < ALPHA


def test_the_relative_mode_scales_by_the_update_itself_and_by_the_floor_below_it() -> None:
    mechanism = relative((2, 2), 4.0, 0.1, 0.1)
    event = mechanism.release([3.0, 4.0, 0.0, 0.03], rng=rng.seeded(1)).event
    assert event.neighbourhood is Neighbourhood.RELATIVE
    assert [layer.radius for layer in event.layers] == [5.0, 0.1]
    assert [layer.epsilon for layer in event.layers] == pytest.approx([2 / (4 * 5.0), 2 / (4 * 0.1)])


@pytest.mark.parametrize("build", [fixed, relative])
def test_a_zero_update_is_still_noised(build) -> None:
    released = build((5, 3), 1.0, 0.2, 0.2).release(np.zeros(8), rng=rng.secure()).update
    assert np.all(released != 0)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.floats(1e-3, 1e3),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_planned_loss_is_what_the_records_add_up_to(
    sizes: list[int], noise_multiplier: float, is_fixed: bool, seed: int
) -> None:
    generator = rng.seeded(seed)
    lengths = generator.uniform(0.01, 10, len(sizes))
    mechanism = (fixed if is_fixed else relative)(tuple(sizes), noise_multiplier, *map(float, lengths))
    event = mechanism.release(generator.standard_normal(sum(sizes)), rng=generator).event
    assert mechanism.planned_loss == sum(sizes) / noise_multiplier
    charged = math.fsum(layer.epsilon * layer.radius for layer in event.layers)
    assert charged == pytest.approx(mechanism.planned_loss, rel=1e-14)


def test_the_hospital_model_costs_eleven_thirds() -> None:
    assert fixed(HOSPITAL, 3.0, 1.0, 1.0, 1.0, 1.0).planned_loss == 11 / 3
    assert fixed((11,), 3.0, 1.0).planned_loss == 11 / 3


def test_the_loss_of_two_updates() -> None:
    mechanism = fixed((6, 2), 3.0, 0.5, 2.0)
    assert mechanism.privacy_loss([0.0, 0.0]) == 0
    assert mechanism.privacy_loss([0.5, 2.0]) == pytest.approx(8 / 3)  # within the radii: n/ν
    assert mechanism.privacy_loss([0.25, 0.0]) == pytest.approx(1.0)
    # Clipped vectors are at most 2C apart, so no two updates cost more than 2n/ν.
    assert mechanism.privacy_loss([math.inf, 1e9]) == pytest.approx(16 / 3)


def test_the_relative_mode_has_no_finite_loss() -> None:
    mechanism = relative((6, 2), 3.0, 0.5, 2.0)
    assert mechanism.privacy_loss([0.0, 0.0]) == 0
    assert mechanism.privacy_loss([0.0, 1e-9]) == math.inf


def norm_leak(dimension: int, ratio: float) -> tuple[float, float]:
    """Where the radial laws Gamma(n, 1) and Gamma(n, R) cross, x* = n·ln R/(1 − 1/R), and their total variation."""
    crossing = dimension * math.log(ratio) / (1 - 1 / ratio)
    law = stats.gamma(dimension)
    return crossing, float(law.cdf(crossing) - law.cdf(crossing / ratio))


# papers.md, part (a), weak point 1.
@pytest.mark.parametrize(
    ("dimension", "ratio", "variation"),
    [
        (2, 1.5, 0.2165),
        (11, 1.5, 0.4949),
        (11, 2.0, 0.7445),
        (1_206_590, 1.001, 0.4170),
        (1_206_590, 1.005, 0.9938),
    ],
)
def test_how_far_apart_the_relative_mode_leaves_two_norms(dimension: int, ratio: float, variation: float) -> None:
    assert norm_leak(dimension, ratio)[1] == pytest.approx(variation, abs=5e-5)


@pytest.mark.parametrize("mode", ["fixed", "relative"])
def test_one_output_shows_the_norm_in_the_relative_mode_only(mode: str) -> None:
    # Two updates of norms 1 and 2, and the event that tells their noise apart best.
    crossing, variation = norm_leak(11, 2.0)
    mechanism = (fixed if mode == "fixed" else relative)((11,), 1.0, *([2.0] if mode == "fixed" else [0.1]))
    generator = rng.seeded(9, mode)
    above = []
    for norm in (1.0, 2.0):
        update = np.zeros(11)
        update[0] = norm
        radii = [np.linalg.norm(mechanism.release(update, rng=generator).update - update) for _ in range(4000)]
        above.append(float(np.mean(np.array(radii) * 11 > crossing)))
    leaked = above[1] - above[0]
    assert abs(leaked - (variation if mode == "relative" else 0.0)) < 6.1 * math.sqrt(0.5 / 4000)


def test_the_update_is_not_written_to() -> None:
    for build in (fixed, relative):
        update = np.full(8, 7.0, np.float32)
        update.setflags(write=False)
        released = build((6, 2), 1.0, 1.0, 1.0).release(update, rng=rng.seeded(1)).update
        assert released.dtype == np.float64
        assert released.shape == (8,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("build", [fixed, relative])
def test_a_non_finite_update_never_leaves_and_draws_nothing(build, bad: float) -> None:
    generator = rng.seeded(1)
    before = generator.bit_generator.state
    update = np.zeros(8)
    update[7] = bad
    with pytest.raises(ValueError, match=f"update_vector to be finite, found {bad}"):
        build((6, 2), 1.0, 1.0, 1.0).release(update, rng=generator)
    assert generator.bit_generator.state == before


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: fixed((), 1.0), "sizes to hold at least one layer, found"),
        (lambda: fixed((3, 0), 1.0, 1.0, 1.0), r"sizes\[1\] .* found 0"),
        (lambda: fixed((3,), 0.0, 1.0), "noise_multiplier > 0 and finite, found 0.0"),
        (lambda: fixed((3,), -1.0, 1.0), "noise_multiplier > 0 and finite, found -1.0"),
        (lambda: fixed((3,), math.nan, 1.0), "noise_multiplier > 0 and finite, found nan"),
        (lambda: fixed((3,), 1.0, 0.0), r"radii\[0\] > 0 and finite, found 0.0"),
        (lambda: fixed((3,), 1.0, 1.0, 1.0), r"one of radii per layer \(1\), found 2"),
        (lambda: relative((3,), 1.0, -0.5), r"floors\[0\] > 0 and finite, found -0.5"),
        (lambda: relative((3, 2), 1.0, 0.5), r"one of floors per layer \(2\), found 1"),
        (lambda: fixed((3,), 1.0, 1e-300), "epsilon"),
        (lambda: fixed((3,), 1.0, 1.0).release(np.zeros(4), rng=rng.seeded(1)), "3 numbers, found 4"),
        (lambda: fixed((3,), 1.0, 1.0).release([], rng=rng.seeded(1)), "3 numbers, found 0"),
        (lambda: fixed((3,), 1.0, 1.0).privacy_loss([-1.0]), r"distances\[0\] >= 0, found -1.0"),
        (lambda: fixed((3,), 1.0, 1.0).privacy_loss([1.0, 1.0]), r"distances per layer \(1\), found 2"),
        (lambda: split_radius(0.0, [1]), "total > 0 and finite, found 0.0"),
        (lambda: split_radius(1.0, []), "sizes .* found none"),
        (lambda: split_radius(1.0, [2, 0]), r"sizes\[1\] .* found 0"),
        (lambda: split_radius(1.0, [2], "other"), "rule equal, sqrt-dimension or public-norms, found 'other'"),
        (lambda: split_radius(1.0, [2], "public-norms"), "public_norms .* found None"),
        (lambda: split_radius(1.0, [2], "equal", [1.0]), "public_norms .* found"),
        (lambda: split_radius(1.0, [2], "public-norms", [1.0, 2.0]), r"public_norms per layer \(1\), found 2"),
        (lambda: split_radius(1.0, [2], "public-norms", [0.0]), r"public_norms\[0\] > 0 and finite, found 0.0"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


def test_the_three_ways_to_split_a_radius() -> None:
    assert split_radius(2.0, (9, 1, 4, 2)) == (1.0, 1.0, 1.0, 1.0)
    assert split_radius(4.0, (9, 1, 4, 2), "sqrt-dimension") == pytest.approx((3.0, 1.0, 2.0, math.sqrt(2)))
    assert split_radius(5.0, (9, 1), "public-norms", (30.0, 40.0)) == pytest.approx((3.0, 4.0))


@given(st.floats(1e-3, 1e3), st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_the_split_radii_fit_in_the_ball_of_the_total(total: float, sizes: list[int]) -> None:
    for radii in (split_radius(total, sizes), split_radius(total, sizes, "sqrt-dimension")):
        assert math.hypot(*radii) == pytest.approx(total, rel=1e-14)


def test_a_scale_that_underflows_is_an_error_and_not_a_division_by_zero() -> None:
    with pytest.raises(ValueError, match="Expected noise multiplier times radius above 0 in float64"):
        LayerwiseLaplace((3,), 1e-200, FixedNeighbourhood((1e-200,)))
