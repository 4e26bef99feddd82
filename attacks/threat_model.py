"""What a curious server knows when it attacks: plain data, which every attack reads and none changes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from torch import Tensor

from coterie.attacks.models import AuditedModel
from coterie.attacks.shapes import image_shape
from coterie.config import Granularity
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.parameters import Layer


class Knowledge(StrEnum):
    """Something that an attack needs beyond the weights that were sent and the vector that came back.

    The server of federated learning always knows the training settings (it sends them) and the mechanism (the
    protocol names it, and a data holder's policy is public); they are not listed here.
    """

    SMOOTH_MODEL = "twice differentiable model"  # the attack differentiates a gradient
    CLASSES = "classes"  # the targets are classes, so that a label can be inferred or tried
    IMAGE = "image"  # inputs are (channels, height, width): neighbouring pixels are alike
    BOUNDED = "bounded"  # the range of the inputs, such as [0, 1] for pixels
    PUBLIC_DATA = "public data"  # other people's rows of the same kind
    CANDIDATES = "candidates"  # a list of data sets, one of which may be the client's
    HYPOTHESES = "hypotheses"  # several models were sent, and the client chose one
    DENSE_FIRST_LAYER = "dense first layer"  # the inputs enter a fully connected layer
    SINGLE_ROW = "a batch of one row"
    RELATIVE_NOISE = "relative noise"  # the noise's scale depends on the private update


@dataclass(frozen=True)
class Rows:
    """Inputs and targets that the server holds itself: ``inputs`` (m, …), ``targets`` (m, …)."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return int(self.inputs.shape[0])


@dataclass(frozen=True)
class ThreatModel:
    """The server's knowledge of one client's training and release.

    ``noised`` are the slices of the parameter vector that got noise each by itself (the layers, or one slice for
    the whole vector); ``lengths`` holds, one per slice, the public radius C_l in the fixed mode and the floor of
    ‖δ_l‖ in the relative mode. ``noise_multiplier`` is ν; 0 is the audit's own control: no noise and no clipping,
    which no deployed client offers.

    The client takes ``local_steps`` steps of SGD with ``step_size`` s on one batch of ``batch_size`` B rows, so that
    for one step δ = −s·∇ mean loss. ``targets`` (B, …) are the labels where the server knows them, else None.
    ``input_range`` bounds every input, such as (0, 1) for pixels. ``public`` are rows of other people for priors.
    ``candidates`` are data sets of B rows, inputs (m, B, …), targets (m, B, …), for the candidate test.
    """

    noised: tuple[Layer, ...]
    noise_multiplier: float
    neighbourhood: Neighbourhood
    lengths: tuple[float, ...]
    input_shape: tuple[int, ...]
    classes: int | None
    batch_size: int = 1
    local_steps: int = 1
    step_size: float = 1.0
    input_range: tuple[float, float] | None = None
    targets: Tensor | None = None
    public: Rows | None = None
    candidates: Rows | None = None

    def __post_init__(self) -> None:
        if not self.noise_multiplier >= 0 or self.noise_multiplier == float("inf"):
            raise CoterieError(f"Expected a finite noise multiplier ν ≥ 0, found {self.noise_multiplier}")
        for name, count in (("batch size", self.batch_size), ("local steps", self.local_steps)):
            if count < 1:
                raise CoterieError(f"Expected {name} of at least 1, found {count}")
        if not self.step_size > 0:
            raise CoterieError(f"Expected step size > 0, found {self.step_size}")
        if len(self.lengths) != len(self.noised) or not all(length > 0 for length in self.lengths):
            raise CoterieError(
                f"Expected one positive radius per noised slice ({len(self.noised)}), found {self.lengths}"
            )

    @property
    def is_clipped(self) -> bool:
        """Whether what was noised had been clipped to the public radii before."""
        return self.noise_multiplier > 0 and self.neighbourhood is Neighbourhood.FIXED

    def knowing(self, **changes: object) -> "ThreatModel":
        """The same threat with other knowledge, such as ``knowing(targets=labels)``."""
        return replace(self, **changes)  # type: ignore[arg-type]


def threat_for(
    model: AuditedModel,
    noise_multiplier: float,
    *,
    neighbourhood: Neighbourhood = Neighbourhood.RELATIVE,
    clipping_norm: float | Mapping[str, float] | None = None,
    relative_floor: float = 1e-9,
    granularity: Granularity = Granularity.LAYER,
    batch_size: int = 1,
    local_steps: int = 1,
    step_size: float = 1.0,
    public: Rows | None = None,
) -> ThreatModel:
    """The threat that a run's settings mean for a model, with the radii that ``client.policy.policy_for`` gives.

    ``clipping_norm`` None takes the task's proposal. In the relative mode the floor of ‖δ_l‖ is ``relative_floor``
    (an absolute norm); the default plays no part, as in the paper, which has none. Images have inputs in [0, 1].
    """
    proposed = model.task.clipping_norm if clipping_norm is None else clipping_norm
    layers = model.layout.layers
    try:
        radii = tuple(float(proposed[x.name] if isinstance(proposed, Mapping) else proposed) for x in layers)
    except KeyError as error:
        raise CoterieError(f"Expected a clipping norm for layer {error}, found none") from error
    if granularity is Granularity.WHOLE:
        layers = (Layer("all", 0, model.layout.size),)
        radii = (math.sqrt(math.fsum(radius * radius for radius in radii)),)
    if neighbourhood is Neighbourhood.RELATIVE:
        radii = (relative_floor,) * len(radii)
    return ThreatModel(
        noised=layers,
        noise_multiplier=noise_multiplier,
        neighbourhood=neighbourhood,
        lengths=radii,
        input_shape=model.input_shape,
        classes=model.classes,
        batch_size=batch_size,
        local_steps=local_steps,
        step_size=step_size,
        input_range=(0.0, 1.0) if image_shape(model.input_shape) else None,
        public=public,
    )
