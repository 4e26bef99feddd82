"""Weighted label sums: golden vectors, brute-force integrals, Monte Carlo of whole bags, and what is no guarantee."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import integrate, special, stats

from coterie import rng
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.aggregation import (
    AggregateFeaturesAndLabels,
    AggregateNoisyLabels,
    InstanceReport,
    draw_bags,
)
from coterie.mechanisms.labels.aggregation_loss import (
    RegressionBags,
    gaussian_delta,
    gaussian_pair_delta,
    noisy_bag_delta,
    regression_delta,
)
from coterie.mechanisms.randomness import NoiseSource

ALPHA = 1e-9


# papers.md (c): r, D, ε, δ for a label without own noise, and with it.
@pytest.mark.parametrize(
    ("noisy", "change", "epsilon", "without", "own"),
    [
        (25, 1, 1, 5.178e-4, 2.564e-4),
        (25, 2, 1, 1.1562e-2, None),
        (100, 1, 0.5, 1.454e-4, None),
        (100, 2, 1, 3.653e-4, None),
        (50, 2, 1, 2.554e-3, None),
    ],
)
def test_golden_vectors_of_noisy_bags(noisy, change, epsilon, without, own) -> None:
    assert noisy_bag_delta(noisy, change, epsilon, own=False) == pytest.approx(without, rel=3e-4)
    if own is not None:
        assert noisy_bag_delta(noisy, change, epsilon, own=True) == pytest.approx(own, rel=3e-4)


@pytest.mark.parametrize(
    ("noisy", "change", "epsilon"), [(25, 1.0, 1.0), (1, 0.3, 0.2), (2, 2.0, 4.0), (900, 3.0, 0.1), (3, 1e-3, 1.0)]
)
def test_noisy_bags_by_an_independent_integral(noisy: int, change: float, epsilon: float) -> None:
    """Over t = √(χ²₁/χ²_r)·√r, which is |Student's t|, and over Beta(1/2, (r − 1)/2)."""

    def without(t: float) -> float:
        return 2 * stats.t(noisy).pdf(t) * float(gaussian_delta(epsilon, change * t / math.sqrt(noisy)))

    pieces = [0.0, 0.5, 1, 2, 4, 8, 16, 64, 256, 1024, 1e4, 1e5, 1e7]
    expected = sum(integrate.quad(without, a, b, epsabs=0, epsrel=1e-9)[0] for a, b in itertools.pairwise(pieces))
    assert noisy_bag_delta(noisy, change, epsilon, own=False) == pytest.approx(expected, rel=1e-6)
    if noisy > 1:
        beta = stats.beta(0.5, (noisy - 1) / 2)
        own = integrate.quad(
            lambda u: 2 * u * beta.pdf(u * u) * float(gaussian_delta(epsilon, change * u)), 0, 1, epsabs=0, limit=500
        )[0]
        assert noisy_bag_delta(noisy, change, epsilon, own=True) == pytest.approx(own, rel=1e-5, abs=1e-30)
    else:
        assert noisy_bag_delta(1, change, epsilon, own=True) == float(gaussian_delta(epsilon, change))


def test_noisy_bags_by_monte_carlo() -> None:
    draws = rng.seeded(1).standard_normal((200_000, 11))
    for own, power in ((False, draws[:, 1:]), (True, draws[:, :10])):  # ten noisy members, the changed one first
        mu = 2.0 * np.abs(draws[:, 0]) / np.linalg.norm(power, axis=1)
        sample = gaussian_delta(0.7, mu)
        expected = noisy_bag_delta(10, 2.0, 0.7, own=own)
        assert abs(sample.mean() - expected) < 6.2 * sample.std() / math.sqrt(sample.size)
        assert abs(sample.mean() - noisy_bag_delta(12, 2.0, 0.7, own=own)) > 6.2 * sample.std() / math.sqrt(sample.size)


def test_golden_vectors_of_two_gaussians() -> None:
    assert gaussian_pair_delta(0.05, 0.0, 1.0, 1.21) == pytest.approx(0.0162544, abs=6e-8)
    assert gaussian_pair_delta(0.05, 0.0, 1.21, 1.0) == pytest.approx(0.0337522, abs=6e-8)
    assert gaussian_pair_delta(1.0, 1.0, 1.0, 1.0) == pytest.approx(0.1269367, abs=6e-8)
    assert gaussian_delta(1.0, [0.0, 1.0, math.inf]).tolist() == [0.0, pytest.approx(0.1269367, abs=6e-8), 1.0]


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1.0, 3.0])
@pytest.mark.parametrize(
    ("shift", "variance", "other"),
    [
        (0, 1, 1.21),
        (0, 1.21, 1),
        (1, 1, 1),
        (-1, 1, 1),
        (2, 1, 4),
        (-2, 4, 1),
        (0.5, 1, 1 + 1e-13),
        (0, 1, 1),
        (3, 2, 2.5),
    ],
)
def test_two_gaussians_by_integration(epsilon: float, shift: float, variance: float, other: float) -> None:
    x = np.linspace(-40, 40, 800_001)
    p, q = stats.norm.pdf(x, 0, math.sqrt(variance)), stats.norm.pdf(x, shift, math.sqrt(other))
    expected = np.maximum(p - math.exp(epsilon) * q, 0).sum() * (x[1] - x[0])
    assert gaussian_pair_delta(epsilon, shift, variance, other) == pytest.approx(expected, abs=2e-9)


@pytest.mark.parametrize(("epsilon", "variance", "other"), [(12.0, 1.0, 1.0), (12.0, 1.0, 1.02), (12.0, 1.02, 1.0)])
def test_two_gaussians_are_mirrored_far_into_the_tails(epsilon: float, variance: float, other: float) -> None:
    right, left = (float(gaussian_pair_delta(epsilon, shift, variance, other)) for shift in (1.0, -1.0))
    assert 0 < right < 1e-4
    assert left == pytest.approx(right, rel=1e-9, abs=0)


def test_no_noise_hides_nothing() -> None:
    assert gaussian_pair_delta(1.0, 0.0, [0.0, 1.0], [1.0, 0.0]).tolist() == [1.0, 1.0]
    assert noisy_bag_delta(0, 1.0, 1.0, own=False) == 1.0


def brute_force(s2: float, r: float, h: float, change: float, epsilon: float) -> tuple[float, float]:
    """δ in both directions by plain sums over g and the label sum."""
    after = s2 + 2 * change * r + change**2 * (1 - h)
    g, step = np.linspace(0, 9, 1201, retstep=True)
    weights = 2 * stats.norm.pdf(g) * step
    weights[0] /= 2
    x, width = np.linspace(-14 * math.sqrt(s2), 14 * math.sqrt(s2), 8001, retstep=True)
    p = stats.norm.pdf(x, 0, math.sqrt(s2))
    forth = back = 0.0
    for shift, weight in zip(change * math.sqrt(h) * g, weights, strict=True):
        q = np.exp(-((x - shift) ** 2) / (2 * after)) / math.sqrt(2 * math.pi * after)
        forth += weight * np.maximum(p - math.exp(epsilon) * q, 0).sum() * width
        back += weight * np.maximum(q - math.exp(epsilon) * p, 0).sum() * width
    return forth, back


# papers.md (c): (s², r, h, D, ε) and δ forth and back, with the relative precision of what is printed there: the
# smallest numbers are a few per cent off, as the brute-force sums beside them show.
@pytest.mark.parametrize(
    ("instance", "forth", "back", "precision"),
    [
        ((10, 1, 0.1, 1, 0.5), 9.39e-9, 1.08287e-2, (0.06, 1e-5)),
        ((50, 1, 0.1, 1, 0.5), 6.0e-12, 2.474e-5, (0.04, 2e-4)),
        ((8.6636, -0.9710, 0.0900, 1, 0.5), 2.5521e-3, 4.45e-6, (1e-3, 0.03)),
    ],
)
def test_golden_vectors_of_wtd_lba(instance, forth, back, precision) -> None:
    s2, r, h, change, epsilon = instance
    found = regression_delta(RegressionBags(s2, np.array([r]), np.array([h])), change, epsilon)
    for delta, golden, exact, tolerance in zip(found, (forth, back), brute_force(*instance), precision, strict=True):
        assert delta[0] == pytest.approx(golden, rel=tolerance)
        assert delta[0] == pytest.approx(exact, rel=1e-3)


def bag(seed: int, k: int = 14, d: int = 3) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    generator = rng.seeded(seed, "bag")
    features = np.column_stack([np.ones(k), generator.standard_normal((k, d - 1))])
    return features, features @ np.arange(1.0, d + 1) + generator.standard_normal(k)


def test_delta_of_a_bag_by_monte_carlo_of_its_whole_output() -> None:
    """ln of the ratio of the (d + 1)-dimensional Gaussian densities of (Σ w x, Σ w y), averaged: no projection."""
    features, labels = bag(1)
    change, epsilon, member = 1.0, 0.3, 4
    moved = labels.copy()
    moved[member] += change
    weights = rng.seeded(2).standard_normal((400_000, labels.size))

    def law(values: NDArray[np.float64]) -> stats.rv_continuous:
        both = np.column_stack([features, values])
        return stats.multivariate_normal(np.zeros(4), both.T @ both)

    instance = RegressionBags.of(features, labels)
    forth, back = (deltas[member] for deltas in regression_delta(instance, change, epsilon))
    for own, other, expected in ((labels, moved, forth), (moved, labels, back)):
        outputs = weights @ np.column_stack([features, own])
        sample = np.maximum(-np.expm1(epsilon - law(own).logpdf(outputs) + law(other).logpdf(outputs)), 0)
        error = sample.std() / math.sqrt(sample.size)
        assert abs(sample.mean() - expected) < 6.2 * error
        assert abs(sample.mean() - 1.1 * expected) > 6.2 * error


def test_what_the_delta_of_a_bag_depends_on() -> None:
    features, labels = bag(3)
    found = RegressionBags.of(features, labels)
    fit = np.linalg.lstsq(features, labels, rcond=None)
    hat = features @ np.linalg.inv(features.T @ features) @ features.T
    assert found.residual == pytest.approx(fit[1][0], rel=1e-12)
    assert found.residuals == pytest.approx(labels - features @ fit[0], abs=1e-12)
    assert found.leverages == pytest.approx(np.diag(hat), rel=1e-12)
    doubled = RegressionBags.of(np.column_stack([features, features[:, 1]]), labels)  # a dependent column adds nothing
    assert doubled.leverages == pytest.approx(found.leverages, rel=1e-9)


def test_labels_that_are_a_function_of_the_features_are_not_hidden_at_all() -> None:
    features, _ = bag(4)
    for change in (0.1, 1e-18):  # the residual that rounding leaves, 1e-15 or so, is no noise
        report = AggregateFeaturesAndLabels(14, 1).report(
            features, features @ [1.0, -2.0, 0.5], np.arange(14)[None], epsilon=5.0, change=change
        )
        assert report.deltas == pytest.approx(np.ones((1, 14)))


def test_a_report_says_that_it_depends_on_the_data() -> None:
    features, labels = bag(5, k=40)
    mechanism = AggregateFeaturesAndLabels(20, 2)
    members = np.arange(40).reshape(2, 20)
    report = mechanism.report(features, labels, members, epsilon=0.5, change=0.7)
    assert isinstance(report, InstanceReport)
    assert report.data_dependent
    assert "NOT a differential privacy" in str(InstanceReport.__doc__)
    expected = []
    for rows in members:
        instance = RegressionBags.of(features[rows], labels[rows])
        pairs = [*regression_delta(instance, 0.7, 0.5), *regression_delta(instance, -0.7, 0.5)]
        expected.append(np.max(pairs, axis=0))
    assert report.deltas == pytest.approx(np.array(expected))
    assert report.worst == report.deltas.max()
    # … and the record of the release has no guarantee to offer.
    assert mechanism.event(40) == LabelRelease("wtd-lba", 40, math.inf)


def test_bags_of_features_and_labels_are_sums_with_the_same_weights(source: NoiseSource) -> None:
    generator = rng.seeded(6)
    features = generator.standard_normal((300, 2))
    found = AggregateFeaturesAndLabels(6, 50)(features, features @ [2.0, -1.0], rng=source)
    assert found.features.shape == (50, 2)
    assert found.labels == pytest.approx(found.features @ [2.0, -1.0], abs=1e-12)
    # With constant features a bag's sum is that of its k weights: N(0, k).
    sums = AggregateFeaturesAndLabels(4, 1500)(np.ones((6000, 1)), np.ones(6000), rng=source).labels
    assert stats.kstest(sums, stats.norm(0, 2).cdf).pvalue > ALPHA
    assert stats.kstest(sums, stats.norm(0, 3).cdf).pvalue < ALPHA


def test_bags_are_disjoint_and_every_example_is_as_likely(source: NoiseSource) -> None:
    members = np.stack([draw_bags(12, 3, 2, rng=source) for _ in range(3000)])
    assert all(len(set(one.reshape(-1))) == 6 for one in members)
    for bag_number in (0, 1):
        assert stats.chisquare(np.bincount(members[:, bag_number].reshape(-1), minlength=12)).pvalue > ALPHA


def test_noisy_bags_have_their_law(source: NoiseSource) -> None:
    mechanism = AggregateNoisyLabels(examples=16_000, bag_size=8, bags=2000, noisy=8000, label_bound=2.0)
    labels = np.linspace(-2, 2, 16_000)
    found, noisy = mechanism.draw(labels, rng=source)
    assert len(set(noisy)) == 8000
    mask = np.isin(found.members, noisy)
    noise = found.labels - np.einsum("mk,mk->m", found.weights, labels[found.members])
    reached = mask.any(axis=1)
    assert np.abs(noise[~reached]).max(initial=0) < 1e-12
    scale = np.sqrt(np.sum(found.weights**2 * mask, axis=1))
    assert stats.kstest(noise[reached] / scale[reached], stats.norm.cdf).pvalue > ALPHA
    assert stats.kstest(noise / np.linalg.norm(found.weights, axis=1), stats.norm.cdf).pvalue < ALPHA
    assert stats.kstest(found.weights.reshape(-1), stats.norm.cdf).pvalue > ALPHA
    deltas = mechanism.realised_deltas(found, noisy, epsilon=1.0)
    mu = 4.0 * abs(found.weights[3, 2]) / math.sqrt(np.sum(found.weights[3] ** 2 * mask[3]))
    assert deltas[3, 2] == pytest.approx(float(gaussian_delta(1.0, mu)), rel=1e-12)


def test_delta_of_noisy_bags_is_the_mean_of_what_is_realised(source: NoiseSource) -> None:
    """Monte Carlo over whole draws: δ of the examples that are not noisy, 0 for those in no bag."""
    mechanism = AggregateNoisyLabels(examples=60, bag_size=10, bags=3, noisy=30, label_bound=0.5)
    means = []
    for _ in range(1500):
        found, noisy = mechanism.draw(np.zeros(60), rng=source)
        deltas = np.zeros(60)
        deltas[found.members] = mechanism.realised_deltas(found, noisy, epsilon=0.5)
        deltas[noisy] = np.nan
        means.append(np.nanmean(deltas))
    error = np.std(means) / math.sqrt(len(means))
    assert abs(np.mean(means) - mechanism.delta(0.5)) < 6.2 * error
    other = AggregateNoisyLabels(examples=60, bag_size=10, bags=3, noisy=25, label_bound=0.5)
    assert abs(np.mean(means) - other.delta(0.5)) > 6.2 * error


def test_the_hypergeometric_law_of_noisy_members() -> None:
    mechanism = AggregateNoisyLabels(examples=30, bag_size=7, bags=2, noisy=12, label_bound=0.5)
    counts = np.arange(7)
    masses = special.comb(12, counts) * special.comb(17, 6 - counts) / special.comb(29, 6)
    expected = (
        14 / 30 * sum(p * noisy_bag_delta(int(r), 1.0, 1.0, own=False) for p, r in zip(masses, counts, strict=True))
    )
    assert mechanism.delta(1.0) == pytest.approx(expected, rel=1e-6)
    everybody = AggregateNoisyLabels(examples=30, bag_size=7, bags=2, noisy=30, label_bound=0.5)
    assert everybody.delta(1.0) == pytest.approx(14 / 30 * noisy_bag_delta(7, 1.0, 1.0, own=True), rel=1e-6)
    assert mechanism.event(1.0) == LabelRelease("noisy-wtd-llp", 30, 1.0, mechanism.delta(1.0))


def test_a_bag_without_a_noisy_member_shows_its_labels() -> None:
    mechanism = AggregateNoisyLabels(examples=50, bag_size=2, bags=25, noisy=1, label_bound=1.0)
    found, noisy = mechanism.draw(np.zeros(50), rng=rng.seeded(1))
    deltas = mechanism.realised_deltas(found, noisy, epsilon=1.0)
    with_noise = (found.members == noisy[0]).any(axis=1)
    assert with_noise.sum() == 1
    assert (deltas[~with_noise] == 1.0).all()
    assert deltas[found.members == noisy[0]] == pytest.approx([float(gaussian_delta(1.0, 2.0))])
    assert mechanism.delta(1.0) > 0.95


G = rng.seeded(1)
LBA = AggregateFeaturesAndLabels(3, 2)
LLP = AggregateNoisyLabels(examples=10, bag_size=3, bags=2, noisy=5, label_bound=1.0)
X, Y = np.ones((10, 2)), np.zeros(10)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: AggregateFeaturesAndLabels(0, 1), "bag_size .* found 0"),
        (lambda: AggregateFeaturesAndLabels(3, 0), "bags .* found 0"),
        (lambda: LBA(np.ones((10, 3)), Y, rng=G), "bag_size above the 3 features, found 3"),
        (lambda: LBA(np.ones((5, 2)), np.zeros(5), rng=G), r"bags \* bag_size up to the 5 examples, found 6"),
        (lambda: LBA(X, np.zeros(9), rng=G), r"features \(n, d\) for 9 labels, found shape \(10, 2\)"),
        (lambda: LBA(X * math.nan, Y, rng=G), "Expected finite features"),
        (lambda: LBA(X, Y * math.nan, rng=G), "one finite number per example"),
        (lambda: LBA.report(X, Y, np.array([[0, 1, 2]]), epsilon=-1.0, change=1.0), "epsilon >= 0, found -1.0"),
        (lambda: LBA.report(X, Y, np.array([[0, 1, 2]]), epsilon=1.0, change=0.0), "change > 0 and finite, found 0.0"),
        (lambda: AggregateNoisyLabels(10, 3, 2, 0, 1.0), "noisy .* found 0"),
        (lambda: AggregateNoisyLabels(10, 3, 2, 11, 1.0), "noisy up to the 10 examples, found 11"),
        (lambda: AggregateNoisyLabels(10, 3, 4, 5, 1.0), "up to the 10 examples, found 12"),
        (lambda: AggregateNoisyLabels(10, 3, 2, 5, 0.0), "label_bound > 0 and finite, found 0.0"),
        (lambda: LLP(np.full(10, 1.5), rng=G), "labels from -1.0 to 1.0, found 1.5"),
        (lambda: LLP(np.zeros(9), rng=G), "10 labels, found 9"),
        (lambda: LLP.delta(math.nan), "epsilon >= 0, found nan"),
        (lambda: noisy_bag_delta(0, 1.0, 1.0, own=True), "noisy .* >= 1, found 0"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
