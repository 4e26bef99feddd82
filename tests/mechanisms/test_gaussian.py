"""The Gaussian mechanism: its law, its closed forms, the same interface."""

import math

import numpy as np
import pytest
from scipy import stats

from coterie import rng
from coterie.mechanisms.events import GaussianRelease
from coterie.mechanisms.gaussian import GaussianMechanism
from coterie.mechanisms.randomness import NoiseSource

ALPHA = 1e-9


def p_values(noise: np.ndarray, sigma: float) -> tuple[float, float]:
    """Kolmogorov-Smirnov against N(0, σ²), and the two-sided tail of Σ ρ_i²/σ² under χ²(n)."""
    energy = float((noise**2).sum()) / sigma**2
    law = stats.chi2(noise.size)
    return (
        float(stats.kstest(noise, stats.norm(scale=sigma).cdf).pvalue),
        2 * min(float(law.cdf(energy)), float(law.sf(energy))),
    )


def test_the_noise_is_normal_and_a_wrong_scale_is_rejected(source: NoiseSource) -> None:
    noise = GaussianMechanism(200_000, 3.0)(np.zeros(200_000), rng=source)
    assert min(p_values(noise, 3.0)) > ALPHA
    for wrong in (3.0 * 1.05, 3.0 / 1.05):
        assert max(p_values(noise, wrong)) < ALPHA
    laplace = rng.seeded(1).laplace(scale=3.0 / math.sqrt(2), size=200_000)
    assert p_values(laplace, 3.0)[0] < ALPHA


def test_closed_forms() -> None:
    mechanism = GaussianMechanism(11, 2.0)
    assert mechanism.component_variance == 4.0
    assert mechanism.mean_norm == pytest.approx(stats.chi(11).mean() * 2, rel=1e-12)
    assert mechanism.norm_quantile(0.9) == pytest.approx(stats.chi(11).ppf(0.9) * 2, rel=1e-12)
    point = np.linspace(-3, 3, 11)
    expected = stats.norm(loc=1.0, scale=2.0).logpdf(point).sum()
    assert mechanism.log_density(point, np.ones(11)) == pytest.approx(expected, rel=1e-13)


def test_there_is_no_pure_loss() -> None:
    assert GaussianMechanism(2, 1.0).privacy_loss(0) == 0
    assert GaussianMechanism(2, 1.0).privacy_loss(1e-9) == math.inf


def test_the_record_of_a_release() -> None:
    assert GaussianMechanism(3, 2.0).event(0.5) == GaussianRelease(3, 2.0, 0.5)


def test_the_output_has_the_input_s_shape_and_is_on_the_grid() -> None:
    mechanism = GaussianMechanism(6, 0.3)
    noisy = mechanism(np.full((2, 3), 5.0, np.float32), rng=rng.seeded(1))
    assert noisy.shape == (2, 3)
    assert np.array_equal(noisy / mechanism.grid, np.rint(noisy / mechanism.grid))
    assert 0.3 * 2.0**-21 < mechanism.grid <= 0.3 * 2.0**-20


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: GaussianMechanism(0, 1.0), "dimension .* found 0"),
        (lambda: GaussianMechanism(2, 0.0), "sigma > 0 and finite, found 0.0"),
        (lambda: GaussianMechanism(2, 1e-200), "sigma between .* found 1e-200"),
        (lambda: GaussianMechanism(2, 1.0).privacy_loss(-1.0), "distance >= 0, found -1.0"),
        (lambda: GaussianMechanism(2, 1.0).norm_quantile(-0.1), "probability .* found -0.1"),
        (lambda: GaussianMechanism(2, 1.0).event(-1.0), "radius > 0 and finite, found -1.0"),
        (lambda: GaussianMechanism(2, 1.0)([1.0], rng=rng.seeded(1)), "x to hold 2 numbers, found 1"),
        (lambda: GaussianMechanism(1, 1.0)([math.nan], rng=rng.seeded(1)), "x to be finite, found nan"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
