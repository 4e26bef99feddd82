"""The forward model: what some rows would have sent, compared with what was received, slice by slice.

Everything is in units of a gradient: an update δ of L steps of size s is read as g = −δ/(s·L), for one step the
gradient itself, for several the mean of the gradients along the way.

What every objective needs of a candidate's gradient g_l in slice l is ‖g_l‖² and ⟨g_l, o_l⟩ with the observed o_l
(``Moments``). A dense layer's weight gradient is Σ_r e_r h_rᵀ over the rows r of its inputs h and of its outputs'
gradients e, so both numbers follow from e and h without forming the matrix:
‖g‖² = Σ_rr' (e_r·e_r')(h_r·h_r') and ⟨g, o⟩ = Σ_r e_rᵀ o h_r. For the 1,206,590-parameter network that is most of
the work saved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.threat_model import ThreatModel
from coterie.mechanisms.events import Neighbourhood
from coterie.parameters import Layout, as_tensors


@dataclass(frozen=True)
class Moments:
    """Of a gradient g, per noised slice l: ``squares`` ‖g_l‖² and ``products`` ⟨g_l, o_l⟩, both (slices,)."""

    squares: Tensor
    products: Tensor


@dataclass(frozen=True)
class Target:
    """One piece of evidence, ready to be matched, in float64.

    ``parameters`` are the start's tensors by name and ``observed`` the observed gradient's; ``squares`` (slices,) are
    ‖o_l‖² and ``sizes`` n_l. ``variance`` (slices,) is that of the noise per coordinate of ``observed``, which is a
    mean over ``rounds``; ``rounding`` is the same of float32's arithmetic alone, and included in it. ``limits``
    (slices,) are the clipping radii in units of the gradient, None without clipping. ``factored`` names the weights
    whose gradients need not be formed.
    """

    parameters: Mapping[str, Tensor]
    observed: Mapping[str, Tensor]
    squares: Tensor
    sizes: Tensor
    variance: Tensor
    rounding: Tensor
    limits: Tensor | None
    rounds: int
    slice_of: Mapping[str, int]
    factored: frozenset[str]


class LinearCalls(TorchFunctionMode):
    """Keeps the inputs and outputs of every ``linear`` call, by the weight's identity."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, input, output

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        if func is functional.linear:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **named}
            self.calls.append((given["weight"], given["input"], result))
        return result


def targets_of(model: AuditedModel, observation: Observation, threat: ThreatModel) -> tuple[Target, ...]:
    """Each distinct start's evidence as something to match."""
    scale = threat.step_size * threat.local_steps
    targets = []
    for evidence in observation.evidence():
        start = torch.from_numpy(evidence.start.astype(np.float64))
        observed = torch.from_numpy(-evidence.update / scale)
        pieces = [observed[x.start : x.stop] for x in threat.noised]
        squares = torch.stack([piece.square().sum() for piece in pieces])
        sizes = torch.tensor([float(x.size) for x in threat.noised], dtype=torch.float64)
        spacing = torch.from_numpy(np.spacing(np.abs(evidence.start)).astype(np.float64))
        rounding = torch.stack([spacing[x.start : x.stop].square().mean() / 12 for x in threat.noised]) / scale**2
        # float32 arithmetic of the client's training: about 2⁻²⁰ of a slice's norm.
        rounding = rounding * threat.local_steps + squares / sizes * 2.0**-40
        noise = noise_variance(squares, sizes, evidence.rounds, threat)
        target = Target(
            parameters={k: v.detach().requires_grad_() for k, v in as_tensors(start, model.layout).items()},
            observed=as_tensors(observed, model.layout),
            squares=squares,
            sizes=sizes,
            variance=(noise + rounding) / evidence.rounds,
            rounding=rounding / evidence.rounds,
            limits=torch.tensor(threat.lengths, dtype=torch.float64) / scale if threat.is_clipped else None,
            rounds=evidence.rounds,
            slice_of=_slices_by_name(model.layout, threat),
            factored=frozenset(),
        )
        targets.append(_with_factors(model, target, threat))
    return tuple(targets)


def noise_variance(squares: Tensor, sizes: Tensor, rounds: int, threat: ThreatModel) -> Tensor:
    """Per coordinate of one received gradient: ε_l⁻²(n_l + 1)/(s·L)² with ε_l = n_l/(ν·C_l), or ν·‖δ_l‖.

    In the relative mode ‖δ_l‖² is not known; the mean of T received updates has E‖o_l‖² ≈ ‖δ_l‖²(1 + ν²/T), which
    is solved for it (the concentration is about 1/√n_l).
    """
    nu = threat.noise_multiplier
    scale = threat.step_size * threat.local_steps
    lengths = torch.tensor(threat.lengths, dtype=torch.float64) / scale
    if threat.neighbourhood is Neighbourhood.RELATIVE:
        lengths = torch.maximum(lengths, (squares / (1 + nu * nu / rounds)).sqrt())
    return (nu * lengths).square() * (sizes + 1) / sizes.square()


def _slices_by_name(layout: Layout, threat: ThreatModel) -> dict[str, int]:
    return {
        entry.name: next(i for i, own in enumerate(threat.noised) if own.start <= entry.start < own.stop)
        for entry in layout.entries
    }


def mean_loss(model: AuditedModel, parameters: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """The client's loss of a batch, as ``client.training`` minimises it."""
    outputs = functional_call(model.module, dict(parameters), (inputs,))
    return model.task.loss(outputs, targets).mean()


def gradient(
    model: AuditedModel, parameters: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, threat: ThreatModel
) -> dict[str, Tensor]:
    """The mean gradient along the client's local steps, by name, differentiable in ``inputs`` and ``targets``.

    For several steps the training is unrolled: θ ← θ − s·∇, and g = (θ_0 − θ_L)/(s·L).
    """
    current = dict(parameters)
    names = list(current)
    total: list[Tensor] = []
    for step in range(threat.local_steps):
        loss = mean_loss(model, current, inputs, targets)
        found = torch.autograd.grad(loss, [current[name] for name in names], create_graph=True)
        total = [a + b for a, b in zip(total, found, strict=True)] if total else list(found)
        if step + 1 < threat.local_steps:
            current = {n: current[n] - threat.step_size * g for n, g in zip(names, found, strict=True)}
    return {n: g / threat.local_steps for n, g in zip(names, total, strict=True)}


def moments(model: AuditedModel, target: Target, inputs: Tensor, targets: Tensor, threat: ThreatModel) -> Moments:
    """The moments of the gradient of ``inputs`` (B, …) and ``targets``, differentiable in both."""
    squares: list[Tensor | float] = [0.0] * len(threat.noised)
    products: list[Tensor | float] = [0.0] * len(threat.noised)
    if threat.local_steps > 1 or not target.factored:
        for name, value in gradient(model, target.parameters, inputs, targets, threat).items():
            slice_index = target.slice_of[name]
            squares[slice_index] = squares[slice_index] + value.square().sum()
            products[slice_index] = products[slice_index] + (value * target.observed[name]).sum()
        return _moments(squares, products)
    with LinearCalls() as linear:
        loss = mean_loss(model, target.parameters, inputs, targets)
    whole = [name for name in target.parameters if name not in target.factored]
    calls = _factored_calls(linear, target)
    found = torch.autograd.grad(
        loss, [target.parameters[n] for n in whole] + [output for _, _, output in calls], create_graph=True
    )
    for name, value in zip(whole, found, strict=False):
        slice_index = target.slice_of[name]
        squares[slice_index] = squares[slice_index] + value.square().sum()
        products[slice_index] = products[slice_index] + (value * target.observed[name]).sum()
    for name, (ins, errors) in _rows_by_weight(calls, found[len(whole) :]).items():
        slice_index = target.slice_of[name]
        gram = (errors @ errors.T) * (ins @ ins.T)
        squares[slice_index] = squares[slice_index] + gram.sum()
        products[slice_index] = products[slice_index] + ((errors @ target.observed[name]) * ins).sum()
    return _moments(squares, products)


def _moments(squares: Sequence[Tensor | float], products: Sequence[Tensor | float]) -> Moments:
    def stacked(values: Sequence[Tensor | float]) -> Tensor:
        return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])

    return Moments(stacked(squares), stacked(products))


def _factored_calls(linear: LinearCalls, target: Target) -> list[tuple[str, Tensor, Tensor]]:
    names = {id(target.parameters[name]): name for name in target.factored}
    return [(names[id(weight)], entered, output) for weight, entered, output in linear.calls if id(weight) in names]


def _rows_by_weight(
    calls: Sequence[tuple[str, Tensor, Tensor]], errors: Sequence[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """For each weight, the rows of all its calls: inputs (rows, in) and gradients of the outputs (rows, out)."""
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    for (name, entered, _), error in zip(calls, errors, strict=True):
        one = (entered.reshape(-1, entered.shape[-1]), error.reshape(-1, error.shape[-1]))
        seen = rows.get(name)
        rows[name] = one if seen is None else (torch.cat([seen[0], one[0]]), torch.cat([seen[1], one[1]]))
    return rows


def _with_factors(model: AuditedModel, target: Target, threat: ThreatModel) -> Target:
    """``target`` with the dense layers' weights factored, if that gives the same moments on a trial batch.

    A weight that is also used in another way (tied weights) would be missed; the trial finds it.
    """
    weights = {
        name: value
        for module_name, layer in model.module.named_modules()
        if isinstance(layer, nn.Linear)
        for name, value in [(f"{module_name}.weight".lstrip("."), layer.weight)]
        if name in target.parameters
    }
    if threat.local_steps > 1 or not weights:
        return target
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((threat.batch_size, *model.input_shape), generator=generator, dtype=torch.float64)
    labels = trial_targets(model, target, inputs)
    factored = replace(target, factored=frozenset(weights))
    fast = moments(model, factored, inputs, labels, threat)
    plain = moments(model, target, inputs, labels, threat)
    same = torch.allclose(fast.squares, plain.squares, rtol=1e-9, atol=0)
    return factored if same else target


def trial_targets(model: AuditedModel, target: Target, inputs: Tensor) -> Tensor:
    """Some valid targets for ``inputs``: class 0, or zeros of the outputs' shape."""
    if model.classes is not None:
        return torch.zeros(len(inputs), dtype=torch.int64)
    with torch.no_grad():
        return torch.zeros_like(functional_call(model.module, dict(target.parameters), (inputs,)))


def clipped(found: Moments, target: Target) -> Moments:
    """The moments after the clipping that the server knows of: g_l·min(1, C_l/‖g_l‖)."""
    if target.limits is None:
        return found
    factor = torch.clamp(target.limits / (found.squares + 1e-300).sqrt(), max=1.0)
    return Moments(factor.square() * found.squares, factor * found.products)


def squared_distances(found: Moments, target: Target) -> Tensor:
    """‖clip(g_l) − o_l‖² per slice."""
    own = clipped(found, target)
    return own.squares - 2 * own.products + target.squares
