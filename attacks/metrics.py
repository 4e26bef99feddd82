"""How near a reconstruction is: image measures, the controls that give them a meaning, and rates with intervals.

Arrays are float64; an image is (channels, height, width) or (height, width) with values in [0, 1].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from scipy.optimize import linear_sum_assignment
from scipy.stats import norm

from coterie.errors import CoterieError

Array = NDArray[np.float64]
FULL_SSIM, FULL_PSNR = 0.9, 25.0  # dB
CONVERGED_PSNR = 30.0  # dB


@dataclass(frozen=True)
class ImageScore:
    """How near one reconstruction is to its original: MSE, PSNR in dB, SSIM, Pearson correlation."""

    mse: float
    psnr: float
    ssim: float
    correlation: float


@dataclass(frozen=True)
class Controls:
    """What guesses without any attack score, without which an attack's figures mean nothing.

    ``class_mean`` holds one score per image for the mean public image of its class, ``black`` for the empty image.
    ``correlation_bar`` is the class-mean control's 95th percentile of the correlation.
    """

    class_mean: tuple[ImageScore, ...]
    black: tuple[ImageScore, ...]
    correlation_bar: float


@dataclass(frozen=True)
class Verdict:
    """The three levels, for one image.

    *full*: SSIM ≥ 0.9 and PSNR ≥ 25 dB. *identified*: nearest, by correlation, to the true one among 100 same-class
    images (chance 1 %). *recognisable*: identified, and the correlation reaches the class-mean control's 95th
    percentile.
    """

    full: bool
    recognisable: bool
    identified: bool


@dataclass(frozen=True)
class Rate:
    """``hits`` of ``trials`` and Wilson's interval for the rate at ``confidence``."""

    hits: int
    trials: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        """hits / trials."""
        return self.hits / self.trials


def image_score(reconstruction: Array, original: Array) -> ImageScore:
    """The four measures; the reconstruction is cut to [0, 1] and NaN becomes 0 first. Same shapes, else an error."""
    if reconstruction.shape != original.shape:
        raise CoterieError(f"Expected an image of shape {original.shape}, found {reconstruction.shape}")
    found = np.clip(np.nan_to_num(reconstruction), 0.0, 1.0)
    error = mean_squared_error(found, original)
    return ImageScore(error, psnr(error), ssim(found, original), correlation(found, original))


def mean_squared_error(first: Array, second: Array) -> float:
    """Mean of the squared differences."""
    return float(np.mean(np.square(first - second)))


def psnr(error: float, data_range: float = 1.0) -> float:
    """−10·log₁₀(MSE/range²) in dB, at most 120 dB (a perfect match would be infinite)."""
    return -10.0 * math.log10(max(error / data_range**2, 1e-12))


def ssim(first: Array, second: Array, data_range: float = 1.0) -> float:
    """The structural similarity of Wang et al. 2004, with Gaussian windows (σ = 1.5, 11×11), K₁ = .01, K₂ = .03.

    Windowed means, variances and covariance with weights that sum to 1 (population moments), averaged over the
    pixels whose window is inside the image, as their reference code does. An image smaller than 11×11 is averaged
    over all of its pixels, with the window mirrored at the border. Channels are averaged.
    """
    if first.ndim == 3:
        return float(np.mean([ssim(a, b, data_range) for a, b in zip(first, second, strict=True)]))

    def window(values: Array) -> Array:
        smoothed: Array = gaussian_filter(values, 1.5, radius=5)
        return smoothed

    mean1, mean2 = window(first), window(second)
    variance1 = window(first * first) - mean1 * mean1
    variance2 = window(second * second) - mean2 * mean2
    covariance = window(first * second) - mean1 * mean2
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    similarity = ((2 * mean1 * mean2 + c1) * (2 * covariance + c2)) / (
        (mean1**2 + mean2**2 + c1) * (variance1 + variance2 + c2)
    )
    inside = similarity[5:-5, 5:-5] if min(first.shape) >= 11 else similarity
    return float(inside.mean())


def correlation(first: Array, second: Array) -> float:
    """Pearson's correlation of the pixels; 0 when either image is constant."""
    a, b = first.ravel() - first.mean(), second.ravel() - second.mean()
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths > 1e-12 else 0.0


def assign(reconstructions: Array, originals: Array) -> NDArray[np.intp]:
    """Which reconstruction belongs to each original, (B,): the one-to-one assignment of least total squared error.

    A gradient is a mean over the batch, so an attack returns its rows in no order. ``reconstructions[assign(…)]`` is
    in the originals' order. Both (B, …); NaN counts as 0.
    """
    size = len(originals)
    a = np.nan_to_num(reconstructions).reshape(size, -1)
    b = originals.reshape(size, -1)
    cost = np.square(a[None, :, :] - b[:, None, :]).sum(axis=2)  # (originals, reconstructions)
    columns: NDArray[np.intp] = linear_sum_assignment(cost)[1]
    return columns


def is_nearest(reconstruction: Array, original: Array, others: Array) -> bool:
    """Whether, of ``original`` and ``others`` (m, …), only the original correlates most with the reconstruction.

    Ties count against the attack: a constant reconstruction identifies nobody.
    """
    found = np.clip(np.nan_to_num(reconstruction), 0.0, 1.0)
    own = correlation(found, original)
    return all(own > correlation(found, other) for other in others)


def controls(originals: Array, class_means: Array, bar_originals: Array, bar_means: Array) -> Controls:
    """Scores of guesses: each original's class-mean image (m, …) and the black image.

    ``bar_originals`` and ``bar_means`` are a larger set of images and their class means (public ones serve), from
    which the 95th percentile of the class mean's correlation is taken.
    """
    bar = [correlation(mean, image) for mean, image in zip(bar_means, bar_originals, strict=True)]
    return Controls(
        tuple(image_score(mean, image) for mean, image in zip(class_means, originals, strict=True)),
        tuple(image_score(np.zeros_like(image), image) for image in originals),
        float(np.quantile(bar, 0.95)),
    )


def verdict(score: ImageScore, *, identified: bool, correlation_bar: float) -> Verdict:
    """The three levels from an image's score and whether it was nearest among 100 of its class."""
    return Verdict(
        full=score.ssim >= FULL_SSIM and score.psnr >= FULL_PSNR,
        recognisable=identified and score.correlation >= correlation_bar,
        identified=identified,
    )


def rate(outcomes: Sequence[bool], confidence: float = 0.95) -> Rate:
    """The share of true outcomes with Wilson's score interval (Wilson 1927), which is never empty or outside [0, 1].

    centre (p + z²/2m)/(1 + z²/m), half-width z·√(p(1−p)/m + z²/4m²)/(1 + z²/m), z the normal quantile.
    """
    trials = len(outcomes)
    if trials == 0:
        raise CoterieError("Expected at least one trial for a rate, found none")
    hits = sum(bool(outcome) for outcome in outcomes)
    share, z = hits / trials, float(norm.ppf(0.5 + confidence / 2))
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2)) / (1 + z * z / trials)
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    high = 1.0 if hits == trials else min(1.0, centre + half)
    return Rate(hits, trials, low, high)


def column_errors(reconstructions: Array, originals: Array, scales: Array) -> Array:
    """Root mean squared error of each input column in units of ``scales`` (its standard deviation), (columns,)."""
    difference: Any = (reconstructions - originals) / scales
    return np.asarray(np.sqrt(np.mean(np.square(difference), axis=0)), dtype=np.float64)
