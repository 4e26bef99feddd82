"""What a server believes of inputs before it sees an update: smoothness, and Gaussians fitted to public rows."""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from coterie.attacks.threat_model import Rows
from coterie.errors import CoterieError

_LEAST_VARIANCE = 1e-4  # of a pixel in [0, 1] outside the principal components


def total_variation(images: Tensor) -> Tensor:
    """Σ √(d² + 10⁻⁶) over the differences d of neighbouring pixels, down and across; images (B, channels, h, w)."""
    down = images[..., 1:, :] - images[..., :-1, :]
    across = images[..., :, 1:] - images[..., :, :-1]
    return (down.square() + 1e-6).sqrt().sum() + (across.square() + 1e-6).sqrt().sum()


@dataclass(frozen=True)
class GaussianPrior:
    """x = μ + S·z with z ~ N(0, I): probabilistic PCA (Tipping and Bishop 1999).

    Σ = V·diag(w)·Vᵀ + σ²(I − VVᵀ) with the leading eigenvectors V (d, K) and eigenvalues w of public rows, and σ² the
    mean of the other eigenvalues; S = Σ^½ is symmetric. Searching over z instead of x makes every direction equally
    uncertain, which is what makes L-BFGS fast.
    """

    mean: Tensor  # (d,)
    components: Tensor  # (K, d)
    deviations: Tensor  # (K,) √w
    residual: float  # σ

    def inputs(self, z: Tensor) -> Tensor:
        """μ + S·z for whitened rows z (…, d)."""
        along = z @ self.components.T
        return self.mean + self.residual * z + ((self.deviations - self.residual) * along) @ self.components

    def whitened(self, inputs: Tensor) -> Tensor:
        """z of inputs x (…, d): S⁻¹(x − μ)."""
        centred = inputs - self.mean
        along = centred @ self.components.T
        return centred / self.residual + ((1 / self.deviations - 1 / self.residual) * along) @ self.components

    def covariance(self) -> Tensor:
        """Σ, (d, d)."""
        variances = self.deviations.square() - self.residual**2
        return (
            self.residual**2 * torch.eye(self.mean.numel(), dtype=torch.float64)
            + (self.components.T * variances) @ self.components
        )


def fit_gaussian(inputs: Tensor, components: int = 100) -> GaussianPrior:
    """The prior fitted to public ``inputs`` (m, …), at least 2; K is at most ``components``, m − 1 and d − 1."""
    flat = inputs.reshape(len(inputs), -1).double().numpy()
    if len(flat) < 2:
        raise CoterieError(f"Expected at least 2 public rows for a prior, found {len(flat)}: add public data")
    kept = max(1, min(components, len(flat) - 1, flat.shape[1] - 1))
    fitted = PCA(kept, svd_solver="covariance_eigh").fit(flat)
    residual = max(float(fitted.noise_variance_), _LEAST_VARIANCE)
    return GaussianPrior(
        torch.from_numpy(np.asarray(fitted.mean_)),
        torch.from_numpy(np.asarray(fitted.components_)),
        torch.from_numpy(np.sqrt(np.maximum(fitted.explained_variance_, residual))),
        residual**0.5,
    )


def fit_class(public: Rows, label: int, components: int = 50) -> GaussianPrior:
    """The prior of the public rows of class ``label``; of all public rows when there are fewer than 20 of them."""
    own = public.inputs[public.targets == label]
    return fit_gaussian(own if len(own) >= 20 else public.inputs, components)
