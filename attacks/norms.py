"""The norm side channel of relative noise: what is sent shows how long the private update was, at any ν."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.attacks.attack import Reconstruction, check_applies
from coterie.attacks.candidates import candidate_update
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.threat_model import Knowledge, ThreatModel


@dataclass(frozen=True)
class NormSideChannel:
    """Ranks candidates by the norms of the slices alone, never by their directions.

    With relative noise ‖o_l‖² concentrates at ‖δ_l‖²(1 + ν²): ln‖o_l‖² has variance v_l = 4ν²/(n_l(1 + ν²)) about
    ln‖δ_l‖² + ln(1 + ν²), at most 4/n_l however large ν is. Score: Σ over rounds and slices of the squared deviation
    over 2v_l. A public radius (the fixed neighbourhood) closes this.
    """

    name: str = "norm"
    needs: frozenset[Knowledge] = frozenset({Knowledge.CANDIDATES, Knowledge.RELATIVE_NOISE})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Attack; ``ranking`` (m,), and the best candidate's rows."""
        check_applies(self, model, observation, threat)
        assert threat.candidates is not None
        nu, scores, evaluations = threat.noise_multiplier, np.zeros(len(threat.candidates)), 0
        starts = observation.starts
        known: dict[bytes, list[NDArray[np.float64]]] = {}  # each start's candidates' squared norms (slices,)
        for start, received in zip(starts, observation.received, strict=True):
            key = start.tobytes()
            if key not in known:
                known[key] = [
                    squared_norms(candidate_update(model, start, threat, inputs, targets), threat)
                    for inputs, targets in zip(threat.candidates.inputs, threat.candidates.targets, strict=True)
                ]
                evaluations += len(scores)
            observed = squared_norms(received.astype(np.float64) - start, threat)
            sizes = np.array([layer.size for layer in threat.noised], dtype=np.float64)
            variance = 4 * nu * nu / (sizes * (1 + nu * nu))
            floors = np.square(threat.lengths)
            for candidate, norms in enumerate(known[key]):
                expected = norms + nu * nu * np.maximum(norms, floors)
                deviation = np.log(np.maximum(observed, 1e-300)) - np.log(np.maximum(expected, 1e-300))
                scores[candidate] += float((np.square(deviation) / (2 * variance)).sum())
        best = int(np.argmin(scores))
        return Reconstruction(
            threat.candidates.inputs[best].double(),
            threat.candidates.targets[best],
            scores,
            float(scores[best]),
            evaluations,
        )


def squared_norms(update: NDArray[np.float64], threat: ThreatModel) -> NDArray[np.float64]:
    """‖δ_l‖² of each noised slice, (slices,)."""
    return np.array([np.square(update[layer.start : layer.stop]).sum() for layer in threat.noised])
