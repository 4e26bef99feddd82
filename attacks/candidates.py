"""Is it this one? The likelihood of what was received under each of a list of data sets; nothing is optimised."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.attacks.attack import Reconstruction, check_applies
from coterie.attacks.matching import gradient
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.threat_model import Knowledge, ThreatModel
from coterie.parameters import as_tensors

_NUMBERS_AT_ONCE = 20_000_000  # received numbers held in float64


@dataclass(frozen=True)
class CandidateIdentification:
    """Ranks candidates by the exact likelihood of the L2 Laplace noise; the strongest test there is of one of m.

    −ln p = Σ over rounds and slices of ε_l‖o_l − δ_l‖ − n_l ln ε_l, with ε_l = n_l/(ν·C_l) and δ_l clipped (fixed),
    or ε_l = n_l/(ν·max(‖δ_l‖, floor_l)) (relative, where the noise's scale itself tells candidates apart). Without
    noise it is Σ_l ‖o_l − δ_l‖²/‖o_l‖². The best candidate's rows are the reconstruction.

    What a guarantee allows: with pure local loss ε between any two data sets, the right one of m equally likely
    candidates is named with probability at most e^ε/(e^ε + m − 1).
    """

    name: str = "candidates"
    needs: frozenset[Knowledge] = frozenset({Knowledge.CANDIDATES})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Attack; ``ranking`` (m,) is −ln p up to a constant."""
        check_applies(self, model, observation, threat)
        assert threat.candidates is not None
        scores = np.zeros(len(threat.candidates))
        starts = observation.starts
        at_once = max(1, _NUMBERS_AT_ONCE // model.layout.size)
        evaluations = 0
        for first in range(0, observation.rounds, at_once):
            rounds = range(first, min(first + at_once, observation.rounds))
            received = observation.received[rounds.start : rounds.stop].astype(np.float64)
            updates = received - starts[rounds.start : rounds.stop]
            for own in _equal_starts(starts[rounds.start : rounds.stop]):
                for candidate, rows in enumerate(zip(threat.candidates.inputs, threat.candidates.targets, strict=True)):
                    update = candidate_update(model, starts[first + own[0]], threat, *rows)
                    scores[candidate] += negative_log_likelihood(updates[own], update, threat)
                    evaluations += 1
        best = int(np.argmin(scores))
        return Reconstruction(
            threat.candidates.inputs[best].double(),
            threat.candidates.targets[best],
            scores,
            float(scores[best]),
            evaluations,
        )


def _equal_starts(starts: NDArray[np.float32]) -> list[list[int]]:
    groups: list[list[int]] = []
    for t, start in enumerate(starts):
        for group in groups:
            if np.array_equal(start, starts[group[0]]):
                group.append(t)
                break
        else:
            groups.append([t])
    return groups


def candidate_update(
    model: AuditedModel, start: NDArray[np.float32], threat: ThreatModel, inputs: Tensor, targets: Tensor
) -> NDArray[np.float64]:
    """The update (n,) that a candidate's rows (B, …) would have given from ``start``, before clipping and noise."""
    parameters = {
        name: value.requires_grad_()
        for name, value in as_tensors(torch.from_numpy(start.astype(np.float64)), model.layout).items()
    }
    found = gradient(model, parameters, inputs.double(), targets, threat)
    flat = torch.cat([found[entry.name].detach().reshape(-1) for entry in model.layout.entries])
    return flat.numpy() * (-threat.step_size * threat.local_steps)


def negative_log_likelihood(updates: NDArray[np.float64], candidate: NDArray[np.float64], threat: ThreatModel) -> float:
    """−ln of the density of ``updates`` (T, n) if ``candidate`` (n,) is the true update, up to a constant."""
    total = 0.0
    for layer, length in zip(threat.noised, threat.lengths, strict=True):
        own = candidate[layer.start : layer.stop]
        norm = float(np.linalg.norm(own))
        observed = updates[:, layer.start : layer.stop]
        if threat.is_clipped:
            own, scale = own * min(1.0, length / max(norm, 1e-300)), length
        else:
            scale = max(norm, length)
        distances = np.sqrt([np.square(one - own).sum() for one in observed])
        if threat.noise_multiplier == 0:
            total += float((np.square(distances) / np.maximum(np.square(observed).sum(axis=1), 1e-300)).sum())
        else:
            epsilon = layer.size / (threat.noise_multiplier * scale)
            total += float(epsilon * distances.sum() - len(observed) * layer.size * np.log(epsilon))
    return total
