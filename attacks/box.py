"""Gradient matching that converges: the label inferred, pixels in their box, a real line search, restarts."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.attacks.attack import Reconstruction, check_applies
from coterie.attacks.labels import labels_for
from coterie.attacks.matching import moments, squared_distances, targets_of
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.optimisation import bounded_lbfgs
from coterie.attacks.starts import feature_start, random_start
from coterie.attacks.threat_model import Knowledge, ThreatModel

_MATCHED = 1e-9  # of ‖o‖²: a residual this small is no local minimum elsewhere


@dataclass(frozen=True)
class BoxConstrained:
    """min over x in the box of Σ_l ‖clip(g_l) − o_l‖² by L-BFGS-B in float64, keeping the lowest of the restarts.

    The first start has the features that a dense layer's gradient shows (``starts.feature_start``), where there is
    one; the others are random. A restart is made only while the residual is larger than the noise explains.
    """

    iterations: int = 1000
    restarts: int = 3
    name: str = "box"
    needs: frozenset[Knowledge] = frozenset({Knowledge.SMOOTH_MODEL, Knowledge.CLASSES, Knowledge.BOUNDED})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Attack."""
        check_applies(self, model, observation, threat)
        targets = targets_of(model, observation, threat)
        labels = labels_for(model, targets, threat, rng=rng)

        def objective(variables: Tensor) -> Tensor:
            inputs = variables.view(threat.batch_size, *threat.input_shape)
            total = torch.zeros((), dtype=torch.float64)
            for target in targets:
                found = moments(model, target, inputs, labels, threat)
                total = total + target.rounds * squared_distances(found, target).sum()
            return total

        rounding = sum(float((t.rounding * t.sizes).sum()) * t.rounds for t in targets)
        explained = sum(float((t.variance * t.sizes + _MATCHED * t.squares).sum()) * t.rounds for t in targets)
        best: Reconstruction | None = None
        evaluations = 0
        for attempt in range(self.restarts):
            start = random_start(threat, rng=rng)
            if attempt == 0 and (shown := feature_start(model, targets, threat, start, self.iterations)) is not None:
                start = shown.point.numpy()
                evaluations += shown.evaluations
            found = bounded_lbfgs(objective, start, threat.input_range, self.iterations, enough=rounding)
            evaluations += found.evaluations
            if best is None or found.value < best.score:
                inputs = found.point.view(threat.batch_size, *threat.input_shape)
                best = Reconstruction(inputs, labels, None, found.value, evaluations)
            if found.value <= 1.05 * explained:
                break
        assert best is not None
        return Reconstruction(best.inputs, best.targets, None, best.score, evaluations)
