"""The published attacks: DLG with a joint label, and iDLG with the label by the row-sum rule."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.attacks.attack import Reconstruction, check_applies
from coterie.attacks.labels import row_sum_label
from coterie.attacks.matching import gradient, moments, squared_distances, targets_of
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.optimisation import torch_lbfgs
from coterie.attacks.threat_model import Knowledge, ThreatModel


@dataclass(frozen=True)
class DLG:
    """Deep leakage from gradients as published (Zhu, Liu, Han 2019 and their code): the weakest attacker here.

    min over x and label logits y of Σ‖∇ℓ(x, softmax y) − o‖² in float32, both from N(0, 1), by torch's L-BFGS with
    step size 1, ``iterations`` outer steps, one start. It knows nothing of noise, clipping or the pixels' range.
    """

    iterations: int = 300
    name: str = "dlg"
    needs: frozenset[Knowledge] = frozenset({Knowledge.SMOOTH_MODEL, Knowledge.CLASSES})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Attack; the labels are the largest logits."""
        check_applies(self, model, observation, threat)
        rows, size = threat.batch_size, int(np.prod(threat.input_shape))
        prepared = [
            (
                target.rounds,
                {name: value.detach().float().requires_grad_() for name, value in target.parameters.items()},
                {name: value.float() for name, value in target.observed.items()},
            )
            for target in targets_of(model, observation, threat)
        ]

        def objective(variables: Tensor) -> Tensor:
            inputs = variables[: rows * size].view(rows, *threat.input_shape)
            labels = variables[rows * size :].view(rows, -1).softmax(dim=-1)
            total = torch.zeros(())
            for rounds, parameters, observed in prepared:
                found = gradient(model, parameters, inputs, labels, threat)
                total = (
                    total
                    + rounds
                    * torch.stack([(value - observed[name]).square().sum() for name, value in found.items()]).sum()
                )
            return total

        start = torch.from_numpy(rng.standard_normal(rows * (size + (model.classes or 0)))).float()
        found = torch_lbfgs(objective, start, self.iterations, None)
        point = found.point.double()
        return Reconstruction(
            point[: rows * size].view(rows, *threat.input_shape),
            point[rows * size :].view(rows, -1).argmax(dim=-1),
            None,
            found.value,
            found.evaluations,
        )


@dataclass(frozen=True)
class IDLG:
    """iDLG (Zhao, Mopuri, Bilen 2020) with its best settings: the label by row sums, float64, strong Wolfe.

    min over x of Σ‖∇ℓ(x, ŷ) − o‖², x from N(0, 1), one start. One row only, as its label rule. It knows nothing of
    noise or clipping.
    """

    iterations: int = 100
    name: str = "idlg"
    needs: frozenset[Knowledge] = frozenset({Knowledge.SMOOTH_MODEL, Knowledge.CLASSES, Knowledge.SINGLE_ROW})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Attack."""
        check_applies(self, model, observation, threat)
        targets = targets_of(model, observation, threat)
        labels = row_sum_label(model, targets) if threat.targets is None else threat.targets

        def objective(variables: Tensor) -> Tensor:
            inputs = variables.view(1, *threat.input_shape)
            total = torch.zeros((), dtype=torch.float64)
            for target in targets:
                found = moments(model, target, inputs, labels, threat)
                total = total + target.rounds * squared_distances(found, target).sum()
            return total

        start = torch.from_numpy(rng.standard_normal(int(np.prod(threat.input_shape))))
        found = torch_lbfgs(objective, start, self.iterations, "strong_wolfe")
        return Reconstruction(found.point.view(1, *threat.input_shape), labels, None, found.value, found.evaluations)
