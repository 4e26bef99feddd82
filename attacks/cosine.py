"""Matching directions with total variation (Geiping et al. 2020), which needs no scale and so no noise level."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.attacks.attack import Reconstruction, check_applies
from coterie.attacks.labels import labels_for
from coterie.attacks.matching import clipped, moments, targets_of
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.optimisation import signed_adam
from coterie.attacks.priors import total_variation
from coterie.attacks.shapes import image_shape
from coterie.attacks.threat_model import Knowledge, ThreatModel


@dataclass(frozen=True)
class CosineSimilarity:
    """min over x in the box of 1 − ⟨g, o⟩/(‖g‖‖o‖) + w·TV(x), by Adam on the gradient's sign.

    TV is the mean absolute difference of neighbouring pixels, both ways; w = ``variation_weight``. Inverting
    Gradients (Geiping, Bauermeister, Dröge, Moeller 2020), section 4. One start.
    """

    iterations: int = 1000
    step_size: float = 0.1
    variation_weight: float = 1e-3
    name: str = "cosine"
    needs: frozenset[Knowledge] = frozenset(
        {Knowledge.SMOOTH_MODEL, Knowledge.CLASSES, Knowledge.BOUNDED, Knowledge.IMAGE}
    )

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Attack."""
        check_applies(self, model, observation, threat)
        targets = targets_of(model, observation, threat)
        labels = labels_for(model, targets, threat, rng=rng)
        shape = image_shape(threat.input_shape) or (1, 1, 1)
        rows = threat.batch_size
        total_rounds = sum(target.rounds for target in targets)

        def objective(variables: Tensor) -> Tensor:
            images = variables.view(rows, *shape)
            value = self.variation_weight * total_variation(images) / (variables.numel())
            for target in targets:
                found = clipped(
                    moments(model, target, variables.view(rows, *threat.input_shape), labels, threat), target
                )
                lengths = (found.squares.sum() * target.squares.sum() + 1e-300).sqrt()
                value = value + target.rounds / total_rounds * (1 - found.products.sum() / lengths)
            return value

        start = torch.from_numpy(rng.standard_normal(rows * int(np.prod(shape))))
        found = signed_adam(objective, start, threat.input_range or (0.0, 1.0), self.iterations, self.step_size)
        inputs = found.point.view(rows, *threat.input_shape)
        return Reconstruction(inputs, labels, None, found.value, found.evaluations)
