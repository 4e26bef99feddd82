"""Metrics against their definitions, computed another way."""

import math

import numpy as np
import pytest

from coterie.attacks import metrics
from coterie.errors import CoterieError
from coterie.rng import seeded


def ssim_by_definition(first: np.ndarray, second: np.ndarray) -> float:
    """Wang et al. 2004, window by window: 11×11 Gaussian weights of σ = 1.5 that sum to 1."""
    offsets = np.arange(-5, 6)
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None, :] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    values = []
    for y in range(5, first.shape[0] - 5):
        for x in range(5, first.shape[1] - 5):
            a, b = first[y - 5 : y + 6, x - 5 : x + 6], second[y - 5 : y + 6, x - 5 : x + 6]
            ma, mb = (weights * a).sum(), (weights * b).sum()
            va, vb = (weights * (a - ma) ** 2).sum(), (weights * (b - mb) ** 2).sum()
            cov = (weights * (a - ma) * (b - mb)).sum()
            c1, c2 = 0.01**2, 0.03**2
            values.append((2 * ma * mb + c1) * (2 * cov + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    return float(np.mean(values))


def test_ssim_is_the_definition() -> None:
    rng = seeded(1)
    first = rng.uniform(size=(20, 17))
    for second in (
        rng.uniform(size=(20, 17)),
        np.clip(first + 0.1 * rng.standard_normal(first.shape), 0, 1),
        1 - first,
    ):
        assert metrics.ssim(first, second) == pytest.approx(ssim_by_definition(first, second), abs=1e-12)
    assert metrics.ssim(first, first) == pytest.approx(1.0)


def test_ssim_of_small_images_uses_every_pixel() -> None:
    image = seeded(1).uniform(size=(8, 8))
    changed = image.copy()
    changed[0, 0] = 1 - changed[0, 0]
    assert metrics.ssim(image, changed) < 1


def test_psnr_and_correlation() -> None:
    zeros, tenths = np.zeros((4, 4)), np.full((4, 4), 0.1)
    assert metrics.mean_squared_error(zeros, tenths) == pytest.approx(0.01)
    assert metrics.psnr(0.01) == pytest.approx(20.0)
    assert metrics.psnr(0.0) == 120.0
    assert metrics.psnr(0.01, data_range=10.0) == pytest.approx(40.0)
    image = seeded(2).uniform(size=(4, 4))
    assert metrics.correlation(image, 1 - image) == pytest.approx(-1.0)
    assert metrics.correlation(image, 0.2 * image + 0.1) == pytest.approx(1.0)
    assert metrics.correlation(image, tenths) == 0.0


def test_a_score_survives_what_an_attack_may_return() -> None:
    image = np.full((1, 8, 8), 0.5)
    wild = image.copy()
    wild[0, 0] = [np.nan, np.inf, -np.inf, 7, -7, 0.5, 0.5, 0.5]
    score = metrics.image_score(wild, image)
    assert score.mse == pytest.approx(5 * 0.25 / 64)
    with pytest.raises(CoterieError, match="Expected an image of shape"):
        metrics.image_score(image[0], image)


def test_assignment_undoes_a_permutation() -> None:
    originals = seeded(3).uniform(size=(5, 1, 4, 4))
    order = np.array([3, 0, 4, 1, 2])
    noisy = originals[order] + 0.01
    np.testing.assert_array_equal(noisy[metrics.assign(noisy, originals)], originals + 0.01)


def test_the_levels() -> None:
    score = metrics.ImageScore(0.0, 25.0, 0.9, 0.8)
    assert metrics.verdict(score, identified=True, correlation_bar=0.8) == metrics.Verdict(True, True, True)
    assert not metrics.verdict(score, identified=True, correlation_bar=0.81).recognisable
    assert not metrics.verdict(score, identified=False, correlation_bar=0.0).recognisable
    assert not metrics.verdict(metrics.ImageScore(0.0, 24.9, 0.9, 0.8), identified=True, correlation_bar=0).full
    assert not metrics.verdict(metrics.ImageScore(0.0, 25.0, 0.89, 0.8), identified=True, correlation_bar=0).full


def test_a_constant_reconstruction_identifies_nobody() -> None:
    images = seeded(4).uniform(size=(3, 4, 4))
    assert metrics.is_nearest(images[0], images[0], images[1:])
    assert not metrics.is_nearest(images[1], images[0], images[1:])
    assert not metrics.is_nearest(np.full((4, 4), 0.5), images[0], images[1:])


def test_wilson_interval() -> None:
    """The interval's ends solve |p̂ − p| = z·√(p(1 − p)/m): checked by putting them in."""
    z = 1.959963984540054
    for hits, trials in [(8, 10), (1, 50), (0, 20), (20, 20)]:
        found = metrics.rate([True] * hits + [False] * (trials - hits))
        assert (found.hits, found.trials, found.rate) == (hits, trials, hits / trials)
        for end in (found.low, found.high):
            if 0 < end < 1:
                assert abs(hits / trials - end) == pytest.approx(z * math.sqrt(end * (1 - end) / trials))
    assert metrics.rate([False] * 20).low == 0.0
    assert metrics.rate([True] * 20).high == 1.0
    with pytest.raises(CoterieError, match="at least one trial"):
        metrics.rate([])


def test_controls() -> None:
    rng = seeded(5)
    images, means = rng.uniform(size=(6, 8, 8)), rng.uniform(size=(6, 8, 8))
    found = metrics.controls(images, means, images, means)
    assert found.black[0].mse == pytest.approx(float(np.mean(images[0] ** 2)))
    assert found.class_mean[2].mse == pytest.approx(float(np.mean((images[2] - means[2]) ** 2)))
    bars = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(images, means, strict=True)]
    assert found.correlation_bar == pytest.approx(np.quantile(bars, 0.95))


def test_column_errors() -> None:
    truth = np.array([[1.0, 10.0], [3.0, 10.0]])
    found = np.array([[2.0, 10.0], [3.0, 14.0]])
    np.testing.assert_allclose(
        metrics.column_errors(found, truth, np.array([1.0, 2.0])), [math.sqrt(0.5), math.sqrt(8) / 2]
    )
