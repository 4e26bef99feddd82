"""Reading the inputs off a fully connected first layer, without any search.

For one row the layer's gradient is e·[x, 1]ᵀ: every neuron's row of ∂W is its ∂b times the inputs. With noise, the
leading right singular vector of [∂W, ∂b] averages over the neurons, and a prior fills in what noise hides.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.attacks.attack import Reconstruction, check_applies
from coterie.attacks.labels import labels_for
from coterie.attacks.matching import Target, moments, squared_distances, targets_of, trial_targets
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.optimisation import bounded_lbfgs
from coterie.attacks.priors import fit_gaussian
from coterie.attacks.threat_model import Knowledge, ThreatModel


@dataclass(frozen=True)
class AnalyticFirstLayer:
    """The inputs of one row (for a batch: a weighted mean of its rows, B times), from the first dense layer.

    Works for any loss and any activation, so for tables as well as for images. Several local steps blur it by how
    far the inputs' weights move. Targets that are not classes are then found by matching the whole gradient.
    """

    components: int = 100
    name: str = "analytic"
    needs: frozenset[Knowledge] = frozenset({Knowledge.DENSE_FIRST_LAYER})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Attack."""
        check_applies(self, model, observation, threat)
        targets = targets_of(model, observation, threat)
        size = int(np.prod(threat.input_shape))
        pieces = [observed_inputs(model, target, size) for target in targets]
        precision = torch.tensor([1 / max(p.variance, 1e-300) for p in pieces], dtype=torch.float64)
        found = sum((w * p.inputs for w, p in zip(precision, pieces, strict=True)), torch.zeros(size).double())
        found, variance = found / precision.sum(), float(1 / precision.sum())
        if threat.public is not None and len(threat.public) > 1:
            prior = fit_gaussian(threat.public.inputs, self.components)
            covariance = prior.covariance()
            gain = torch.linalg.solve(covariance + variance * torch.eye(size, dtype=torch.float64), covariance).T
            found = prior.mean + gain @ (found - prior.mean)
        if threat.input_range is not None:
            found = found.clamp(*threat.input_range)
        inputs = found.view(1, *threat.input_shape).repeat(threat.batch_size, *[1] * len(threat.input_shape))
        labels = (
            labels_for(model, targets, threat, rng=rng)
            if model.classes is not None
            else matching_targets(model, targets, inputs, threat)
        )
        score = sum(float(_residual(model, target, inputs, labels, threat).detach()) for target in targets)
        return Reconstruction(inputs, labels, None, score, 1)


@dataclass(frozen=True)
class ObservedInputs:
    """``inputs`` (d,) with noise of ``variance`` per input."""

    inputs: Tensor
    variance: float


def observed_inputs(model: AuditedModel, target: Target, size: int) -> ObservedInputs:
    """The inputs that the first layer's gradient shows, by its leading singular vector.

    Of M = [∂W, ∂b] = e·[x, 1]ᵀ + noise of standard deviation σ the leading left singular vector u has
    uᵀM ≈ ‖e‖·[x, 1] + σ·N(0, I). ‖e‖ is the last coordinate where it stands clear of the noise, and else follows
    from the projections of ∂W and ∂b on each other.
    """
    layer = model.dense_first_layer
    weight, bias = target.observed[f"{layer}.weight"], target.observed[f"{layer}.bias"]
    matrix = torch.cat([weight, bias[:, None]], dim=1)
    left, _, _ = torch.linalg.svd(matrix, full_matrices=False)
    shown = left[:, 0] @ matrix
    sigma = float(target.variance[target.slice_of[f"{layer}.weight"]]) ** 0.5
    length = float(shown[-1])
    return ObservedInputs(shown[:size] / length, (sigma / max(abs(length), 1e-300)) ** 2)


def matching_targets(model: AuditedModel, targets: tuple[Target, ...], inputs: Tensor, threat: ThreatModel) -> Tensor:
    """The real targets under which ``inputs`` give the observed gradients best, by L-BFGS from zero and ±1."""
    zero = trial_targets(model, targets[0], inputs)

    def objective(variables: Tensor) -> Tensor:
        return sum(
            (_residual(model, target, inputs, variables.view(zero.shape), threat) for target in targets),
            torch.zeros((), dtype=torch.float64),
        )

    starts = [np.full(zero.numel(), value) for value in (0.0, -1.0, 1.0)]
    best = min((bounded_lbfgs(objective, start, None, 200) for start in starts), key=lambda found: found.value)
    return best.point.view(zero.shape)


def _residual(model: AuditedModel, target: Target, inputs: Tensor, labels: Tensor, threat: ThreatModel) -> Tensor:
    distances = squared_distances(moments(model, target, inputs, labels, threat), target)
    return (distances / (2 * target.variance)).sum()
