"""Where to start a search: at inputs whose features are those that a dense layer's gradient shows.

For one row and one step a dense layer's gradient is e·[h, 1]ᵀ: the weight's gradient in the bias's direction is the
layer's input h. Finding an input with these features needs no second derivatives and converges where matching
gradients from a random start does not (saturated sigmoids under U(−½, ½) weights).
"""

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from coterie.attacks.matching import LinearCalls, Target
from coterie.attacks.models import AuditedModel
from coterie.attacks.optimisation import Minimum, bounded_lbfgs
from coterie.attacks.threat_model import ThreatModel


def random_start(threat: ThreatModel, *, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """B rows uniform in the inputs' range, or standard normal without one; flat."""
    size = threat.batch_size * int(np.prod(threat.input_shape))
    if threat.input_range is None:
        return rng.standard_normal(size)
    return rng.uniform(*threat.input_range, size)


def shown_features(target: Target) -> dict[str, Tensor]:
    """The inputs h of each dense layer as its gradient shows them, by the weight's name: ∂bᵀ∂W/(‖∂b‖² − noise)."""
    features = {}
    for weight in target.factored:
        bias = weight.removesuffix("weight") + "bias"
        if bias not in target.observed:
            continue
        error = target.observed[bias]
        noise = error.numel() * float(target.variance[target.slice_of[bias]])
        length = float(error.square().sum())
        features[weight] = (error @ target.observed[weight]) / max(length - noise, 0.1 * length, 1e-300)
    return features


def feature_start(
    model: AuditedModel,
    targets: tuple[Target, ...],
    threat: ThreatModel,
    start: np.ndarray[tuple[int], np.dtype[np.float64]],
    iterations: int,
) -> Minimum | None:
    """Inputs that have the shown features, found from ``start``; None when no dense layer shows any.

    Minimises Σ ‖h(x) − ĥ‖²/‖ĥ‖² over layers and pieces of evidence. One row and one local step only.
    """
    shown = [shown_features(target) for target in targets]
    if threat.batch_size > 1 or threat.local_steps > 1 or not any(shown):
        return None

    def objective(variables: Tensor) -> Tensor:
        inputs = variables.view(1, *threat.input_shape)
        total = torch.zeros((), dtype=torch.float64)
        for target, features in zip(targets, shown, strict=True):
            with LinearCalls() as linear:
                functional_call(model.module, dict(target.parameters), (inputs,))
            names = {id(target.parameters[name]): name for name in features}
            for weight, entered, _ in linear.calls:
                if id(weight) in names:
                    wanted = features[names[id(weight)]]
                    total = total + (entered[0] - wanted).square().sum() / wanted.square().sum().clamp(min=1e-300)
        return total

    return bounded_lbfgs(objective, start, threat.input_range, iterations, enough=1e-14)
