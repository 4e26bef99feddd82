"""Priors: the discrete Laplace law, its ε as a ratio, golden vectors, and what is done with nothing."""

import math

import numpy as np
import pytest
from scipy import stats

from coterie import rng
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.prior import HistogramPrior, normalised, public_label_prior, temperature_softmax
from coterie.mechanisms.randomness import NoiseSource

ALPHA = 1e-9


def test_golden_vectors_of_the_discrete_laplace_law() -> None:
    mechanism = HistogramPrior(10, 100, 1.0)  # a = 0.5
    assert mechanism.rate == 0.5
    assert mechanism.noise_probability([0, 1, -1]) == pytest.approx([0.244919, 0.148551, 0.148551], abs=6e-7)
    assert HistogramPrior(10, 100, 0.05).noise_standard_deviation ** 2 == pytest.approx(3199.83, abs=6e-3)
    assert HistogramPrior(10, 50, 0.025).noise_standard_deviation == pytest.approx(113.136, abs=6e-4)


def test_the_standard_deviation_is_that_of_the_law() -> None:
    mechanism = HistogramPrior(2, 1, 0.8)
    counts = np.arange(-400, 401)
    law = mechanism.noise_probability(counts)
    assert law.sum() == pytest.approx(1.0, rel=1e-12)
    assert math.sqrt(law @ counts**2) == pytest.approx(mechanism.noise_standard_deviation, rel=1e-12)
    assert HistogramPrior(2, 1, 1e5).noise_standard_deviation == 0.0


def test_the_noise_has_its_law(source: NoiseSource) -> None:
    labels, groups = [0, 0, 1, 2], [0, 1, 1, 4000]
    mechanism = HistogramPrior(5, 4001, 1.0)
    counts = np.zeros((4001, 5))
    counts[0, 0] = counts[1, 0] = counts[1, 1] = counts[4000, 2] = 1
    noise = (mechanism.noisy_counts(labels, groups, rng=source) - counts).reshape(-1)
    assert np.array_equal(noise, np.rint(noise))

    def p_value(law: HistogramPrior) -> float:
        bins = np.arange(-9, 10)
        probabilities = law.noise_probability(bins)
        tail = (1 - probabilities.sum()) / 2
        found = [np.sum(noise < -9), *(np.sum(noise == value) for value in bins), np.sum(noise > 9)]
        return float(stats.chisquare(found, noise.size * np.array([tail, *probabilities, tail])).pvalue)

    assert p_value(mechanism) > ALPHA
    for wrong in (0.9, 1.1):
        assert p_value(HistogramPrior(5, 4001, wrong)) < ALPHA


def test_epsilon_is_the_largest_ratio_and_attained() -> None:
    """Another label of one example moves two counts by one: H + Z = v needs noise v − H."""
    mechanism = HistogramPrior(3, 1, 0.7)
    before, after = np.array([4, 2, 0]), np.array([3, 3, 0])
    values = np.stack(np.meshgrid(*[np.arange(-6, 12)] * 3), axis=-1).reshape(-1, 3)
    logs = [np.log(mechanism.noise_probability(values - counts)).sum(axis=1) for counts in (before, after)]
    assert np.abs(logs[0] - logs[1]).max() == pytest.approx(mechanism.privacy_loss(), rel=1e-12)
    one_count_only = np.log(mechanism.noise_probability(values[:, 0] - 4)) - np.log(
        mechanism.noise_probability(values[:, 0] - 3)
    )
    assert np.abs(one_count_only).max() == pytest.approx(0.35, rel=1e-12)


def test_priors_follow_the_noisy_counts() -> None:
    mechanism = HistogramPrior(3, 2, 1.0)
    labels, groups = rng.seeded(1).integers(3, size=50), rng.seeded(2).integers(2, size=50)
    noisy = mechanism.noisy_counts(labels, groups, rng=rng.seeded(3))
    expected = np.maximum(noisy, 0)
    prior = mechanism(labels, groups, rng=rng.seeded(3))
    assert prior == pytest.approx(expected / expected.sum(axis=1, keepdims=True), rel=1e-15)


def test_a_group_with_nothing_left_is_uniform() -> None:
    rows = normalised(np.array([[-1.0, -2.0, 0.0, -5.0], [-1.0, 3.0, 0.0, 1.0]]))
    assert rows.tolist() == [[0.25] * 4, [0.0, 0.75, 0.0, 0.25]]
    assert public_label_prior([1, 1, 0, 1], [0, 0, 0, 2], classes=2, group_count=3).tolist() == [
        [1 / 3, 2 / 3],
        [0.5, 0.5],
        [0.0, 1.0],
    ]


def test_softmax_with_a_temperature() -> None:
    assert temperature_softmax([2, 1, 0], 0.5) == pytest.approx([0.866813, 0.117310, 0.015876], abs=6e-7)
    assert temperature_softmax([[2, 1, 0], [7, 7, 7]], 1e9) == pytest.approx(np.full((2, 3), 1 / 3), abs=1e-8)
    assert temperature_softmax([1e300, -1e300]).tolist() == [1.0, 0.0]


def test_the_record_of_a_release() -> None:
    assert HistogramPrior(3, 2, 0.05).event(40) == LabelRelease("histogram-prior", 40, 0.05)


G = rng.seeded(1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: HistogramPrior(1, 2, 1.0), "classes .* found 1"),
        (lambda: HistogramPrior(3, 0, 1.0), "groups .* found 0"),
        (lambda: HistogramPrior(3, 2, 0.0), "epsilon > 0 and finite, found 0.0"),
        (lambda: HistogramPrior(3, 2, 1.0)([3], [0], rng=G), "labels from 0 to 2, found 3"),
        (lambda: HistogramPrior(3, 2, 1.0)([2], [2], rng=G), "groups from 0 to 1, found 2"),
        (lambda: HistogramPrior(3, 2, 1.0)([2, 2], [1], rng=G), "each of 2 examples, found 1"),
        (lambda: public_label_prior([0], [1], classes=2, group_count=1), "groups from 0 to 0, found 1"),
        (lambda: temperature_softmax([1.0, 2.0], 0.0), "temperature > 0 and finite, found 0.0"),
        (lambda: temperature_softmax([1.0, math.nan]), "logits to be finite, found nan"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
