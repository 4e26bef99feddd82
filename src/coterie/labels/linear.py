"""Linear models on what the mechanisms give: multinomial logistic regression on class weights, and least squares."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from coterie.errors import CoterieError
from coterie.mechanisms.labels.aggregation import AggregatedBags
from coterie.mechanisms.labels.arguments import Array, Integers


@dataclass(frozen=True)
class LinearClassifier:
    """Logits x·``coefficients`` + ``intercepts``, shapes (d, K) and (K,)."""

    coefficients: Array
    intercepts: Array

    def logits(self, features: ArrayLike) -> Array:
        """(n, K) for features (n, d)."""
        return np.asarray(np.asarray(features, np.float64) @ self.coefficients + self.intercepts)

    def predict(self, features: ArrayLike) -> Integers:
        """The likeliest class of each row (n,)."""
        return np.asarray(self.logits(features).argmax(axis=1), np.int64)


def fit_logistic(
    features: ArrayLike, weights: ArrayLike, *, regularisation: float, iterations: int = 1000
) -> LinearClassifier:
    """The minimum of (1/n)·Σ_i Σ_z w_iz·(−ln p_z(x_i)) + (λ/2)·(‖coefficients‖² + ‖intercepts‖²), by L-BFGS.

    ``weights`` (n, K) as from ``mechanisms.labels.losses``. Where a row sums to s ≥ 0, its loss is
    s·logsumexp(logits) − w·logits: convex although weights may be negative, but then unbounded below without
    ``regularisation`` λ, which is why the intercepts have it too. Raises ``CoterieError`` for shapes that do not fit, a
    row with a negative sum, and λ ≤ 0.
    """
    rows, table = np.asarray(features, np.float64), np.asarray(weights, np.float64)
    if rows.ndim != 2 or table.ndim != 2 or len(rows) != len(table) or not len(rows):
        raise CoterieError(f"Expected features (n, d) and weights (n, K), found {rows.shape} and {table.shape}")
    if not regularisation > 0:
        raise CoterieError(f"Expected regularisation > 0, found {regularisation}")
    sums = table.sum(axis=1)
    if (sums < -1e-9).any():
        raise CoterieError(f"Expected weights whose rows do not sum to less than 0, found {sums.min():g}")
    count, dimension, classes = len(rows), rows.shape[1], table.shape[1]
    linear = np.vstack([rows.T @ table, table.sum(axis=0)])

    def objective(flat: Array) -> tuple[float, Array]:
        parameters = flat.reshape(dimension + 1, classes)
        logits = rows @ parameters[:-1] + parameters[-1]
        normalisers = special.logsumexp(logits, axis=1)
        value = (sums @ normalisers - np.sum(linear * parameters)) / count
        shares = np.exp(logits - normalisers[:, None]) * sums[:, None]
        gradient = (np.vstack([rows.T @ shares, shares.sum(axis=0)]) - linear) / count
        value += regularisation / 2 * np.sum(parameters**2)
        return float(value), (gradient + regularisation * parameters).ravel()

    found = optimize.minimize(
        objective,
        np.zeros((dimension + 1) * classes),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": iterations, "ftol": 1e-12, "gtol": 1e-8},
    )
    parameters = found.x.reshape(dimension + 1, classes)
    return LinearClassifier(parameters[:-1], parameters[-1])


def fit_aggregates(bags: AggregatedBags, *, ridge: float = 0.0) -> Array:
    """The r (d,) that minimizes Σ_j (ȳ_j − rᵀx̄_j)² + ridge·‖r‖², for wtd-LBA; of several, the one of least norm.

    Bags' weights are standard normal, so its expectation is k·m times the mean squared error plus the ridge. Source:
    arXiv 2310.10092, Section 1.3. Raises ``CoterieError`` for a negative ridge.
    """
    if not ridge >= 0:
        raise CoterieError(f"Expected ridge >= 0, found {ridge}")
    dimension = bags.features.shape[1]
    rows = np.vstack([bags.features, np.sqrt(ridge) * np.eye(dimension)])
    return np.asarray(np.linalg.lstsq(rows, np.concatenate([bags.labels, np.zeros(dimension)]))[0], np.float64)
