"""What an attack is: a pure function from what a server sent and received to what it believes about the data."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.shapes import image_shape
from coterie.attacks.threat_model import Knowledge, ThreatModel
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood


@dataclass(frozen=True)
class Reconstruction:
    """What an attack found; None for what it does not say anything about.

    ``inputs`` are float64 of shape (B, *input_shape), in no particular order of the B rows (``metrics.assign``
    puts them in the truth's); ``targets`` (B,) are class labels, or (B, …) real targets. ``ranking`` (m,) holds a
    score for each candidate or hypothesis, lower is likelier. ``score`` is the attack's own final objective (lower
    is better, comparable within one attack only) and ``evaluations`` how often it evaluated it.
    """

    inputs: Tensor | None
    targets: Tensor | None
    ranking: NDArray[np.float64] | None
    score: float
    evaluations: int


class Attack(Protocol):
    """An attack. Implementations are frozen dataclasses whose fields are their effort (restarts, iterations)."""

    @property
    def name(self) -> str:
        """What the command line and reports call it."""

    @property
    def needs(self) -> frozenset[Knowledge]:
        """What the server must know for it, beyond weights, settings and the received vectors."""

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Attack. Pure: equal arguments (and an equal ``rng``) give equal results; nothing is written to."""


def missing_knowledge(
    attack: Attack, model: AuditedModel, observation: Observation, threat: ThreatModel
) -> frozenset[Knowledge]:
    """What the attack needs and this threat does not offer; empty when the attack applies."""
    offered = {
        Knowledge.SMOOTH_MODEL: not model.kinks,
        Knowledge.CLASSES: threat.classes is not None,
        Knowledge.IMAGE: image_shape(threat.input_shape) is not None,
        Knowledge.BOUNDED: threat.input_range is not None,
        Knowledge.PUBLIC_DATA: threat.public is not None and len(threat.public) > 0,
        Knowledge.CANDIDATES: threat.candidates is not None and len(threat.candidates) > 1,
        Knowledge.HYPOTHESES: observation.hypotheses.shape[1] > 1,
        Knowledge.DENSE_FIRST_LAYER: model.dense_first_layer is not None,
        Knowledge.SINGLE_ROW: threat.batch_size == 1,
        Knowledge.RELATIVE_NOISE: threat.noise_multiplier > 0 and threat.neighbourhood is Neighbourhood.RELATIVE,
    }
    return frozenset(need for need in attack.needs if not offered[need])


def check_applies(attack: Attack, model: AuditedModel, observation: Observation, threat: ThreatModel) -> None:
    """Raise ``CoterieError`` in one line when the attack needs what the threat model lacks."""
    missing = missing_knowledge(attack, model, observation, threat)
    if Knowledge.SMOOTH_MODEL in missing:
        raise CoterieError(
            f"Expected a twice differentiable model for attack {attack.name!r}, found {model.kinks[0]}: "
            f"attack its smooth twin (model 'twin': sigmoids for rectifiers, averaging for max-pooling)"
        )
    if missing:
        raise CoterieError(
            f"Expected {', '.join(sorted(missing))} for attack {attack.name!r}, found none: choose another attack"
        )
