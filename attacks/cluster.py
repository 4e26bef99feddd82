"""Which hypothesis the client chose, when it does not say: the nearest one to what came back."""

from dataclasses import dataclass

import numpy as np

from coterie.attacks.attack import Reconstruction, check_applies
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.threat_model import Knowledge, ThreatModel


@dataclass(frozen=True)
class ClusterIdentification:
    """argmin_j Σ_t ‖θ̃_t − θ_jt‖²: right where the hypotheses are further apart than the updates are long.

    The sum over rounds assumes that the client keeps to one hypothesis. Noise alone does not hide the choice: its
    projection on the line between two hypotheses has a standard deviation of ν‖δ‖/√n only.
    """

    name: str = "cluster"
    needs: frozenset[Knowledge] = frozenset({Knowledge.HYPOTHESES})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Attack; ``ranking`` (k,) holds the summed squared distances above the smallest."""
        check_applies(self, model, observation, threat)
        distances = np.zeros(observation.hypotheses.shape[1])
        for hypotheses, received in zip(observation.hypotheses, observation.received, strict=True):
            for j, hypothesis in enumerate(hypotheses):
                distances[j] += np.square(received.astype(np.float64) - hypothesis).sum()
        return Reconstruction(None, None, distances - distances.min(), float(distances.min()), len(distances))
