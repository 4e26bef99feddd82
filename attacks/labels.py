"""Which labels a batch had, from the output layer's gradient alone.

For cross-entropy the gradient of class c's output row is the mean over the batch of (p_c − 1[y = c])·[h, 1], with
softmax p and features h. Row sums show the label of a single row when the features are positive (Zhao et al. 2020,
iDLG); projecting each row on the features that such data usually have, and allowing for the p that the model gives
them, also counts the labels of a batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from coterie.attacks.attack import Reconstruction
from coterie.attacks.matching import LinearCalls, Target, targets_of
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.threat_model import Knowledge, ThreatModel
from coterie.errors import CoterieError

_REFERENCE_ROWS = 256


@dataclass(frozen=True)
class LabelInference:
    """The B likeliest labels. ``score`` is minus the least margin by which a chosen label was ahead of the next."""

    name: str = "label"
    needs: frozenset[Knowledge] = frozenset({Knowledge.CLASSES})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Infer the labels; ``targets`` (B,) in ascending order."""
        counts = label_counts(model, targets_of(model, observation, threat), threat, rng=rng)
        labels, margin = most_likely(counts, threat.batch_size)
        return Reconstruction(None, labels, None, -margin, 1)


def labels_for(
    model: AuditedModel, targets: tuple[Target, ...], threat: ThreatModel, *, rng: np.random.Generator
) -> Tensor:
    """The labels that an attack works with: those that the server knows, else the inferred ones, (B,)."""
    if threat.targets is not None:
        return threat.targets
    return most_likely(label_counts(model, targets, threat, rng=rng), threat.batch_size)[0]


def row_sum_label(model: AuditedModel, targets: tuple[Target, ...]) -> Tensor:
    """iDLG's rule for one row: argmin_c Σ_j ∂W_cj, on the mean of the evidence, (1,)."""
    weight = output_layer(model, targets[0])
    sums = torch.stack([target.rounds * target.observed[weight].sum(dim=1) for target in targets]).sum(dim=0)
    return sums.argmin()[None]


def label_counts(
    model: AuditedModel, targets: tuple[Target, ...], threat: ThreatModel, *, rng: np.random.Generator
) -> Tensor:
    """How often each class seems to be in the batch, (classes,), real numbers that sum to about B.

    count_c = B·(p̄_c − ⟨∂[W, b]_c, [h̄, 1]⟩/‖[h̄, 1]‖²), with features h̄ and softmax p̄ averaged over public rows, or
    over random inputs where the server has none. Several pieces of evidence are weighted by their precision. Clipping
    shortens the gradient by an unknown factor, which is taken from the length that B different labels would give.
    """
    if threat.public is not None and len(threat.public):
        chosen = rng.permutation(len(threat.public))[:_REFERENCE_ROWS]
        reference = threat.public.inputs[torch.from_numpy(chosen)].double()
    else:
        low, high = threat.input_range or (-1.0, 1.0)
        reference = torch.from_numpy(rng.uniform(low, high, (_REFERENCE_ROWS, *threat.input_shape)))
    weight = output_layer(model, targets[0])
    bias = weight.removesuffix("weight") + "bias"
    total, weights = torch.zeros(targets[0].observed[weight].shape[0], dtype=torch.float64), 0.0
    for target in targets:
        features, shares = _features_and_shares(model, target, reference, weight)
        length = features.square().sum()
        signal = target.observed[weight] @ features
        if bias in target.observed:
            length, signal = length + 1, signal + target.observed[bias]
        variance = target.variance[target.slice_of[weight]]
        shown = signal / length  # p̄ − the labels' shares, unless clipping made it shorter
        if threat.is_clipped:
            shown = shown * _unclipped(shown, shares, float(variance / length), threat.batch_size)
        precision = float(1 / variance.clamp(min=1e-300))
        total += precision * (shares - shown)
        weights += precision
    return threat.batch_size * total / weights


def _unclipped(shown: Tensor, shares: Tensor, variance: float, batch_size: int) -> float:
    """The factor that brings ``shown`` (classes,) to the length of p̄ − ȳ for B different labels, without its noise.

    E‖p̄ − ȳ‖² = 1/B + ‖p̄‖² − 2/K over uniform labels of K classes.
    """
    classes = shares.numel()
    expected = max(1 / batch_size + float(shares.square().sum()) - 2 / classes, 1e-3)
    square = float(shown.square().sum())
    return float((expected / max(square - classes * variance, 0.1 * square, 1e-300)) ** 0.5)


def most_likely(counts: Tensor, batch_size: int) -> tuple[Tensor, float]:
    """The ``batch_size`` labels taken greedily from the largest count, each costing 1; and the least margin."""
    left = counts.clone()
    labels, margin = [], float("inf")
    for _ in range(batch_size):
        top = torch.topk(left, min(2, left.numel()))
        labels.append(int(top.indices[0]))
        margin = min(margin, float(top.values[0] - top.values[-1]))
        left[labels[-1]] -= 1.0
    return torch.tensor(sorted(labels), dtype=torch.int64), margin


def output_layer(model: AuditedModel, target: Target) -> str:
    """The name of the weight of the last dense layer, whose outputs are the classes."""
    found = [name for name, value in target.parameters.items() if name.endswith("weight") and value.ndim == 2]
    if not found or target.parameters[found[-1]].shape[0] != model.classes:
        raise CoterieError(
            f"Expected the last layer of model {model.name!r} to be dense with {model.classes} outputs, found none: "
            f"labels cannot be inferred, leave out the attacks that need them"
        )
    return found[-1]


def _features_and_shares(model: AuditedModel, target: Target, reference: Tensor, weight: str) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), LinearCalls() as linear:
        outputs = functional_call(model.module, dict(target.parameters), (reference,))
    entered = [ins for used, ins, _ in linear.calls if used is target.parameters[weight]]
    if not entered:
        raise CoterieError(f"Expected layer {weight!r} to be used as a dense layer, found it used otherwise")
    return entered[-1].mean(dim=0), outputs.softmax(dim=-1).mean(dim=0)
