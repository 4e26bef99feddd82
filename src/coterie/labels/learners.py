"""Training on noisy labels in torch: any model on per-class weights, and on bags of weighted label sums."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from coterie.errors import CoterieError
from coterie.mechanisms.labels.aggregation import WeightedBags
from coterie.mechanisms.labels.arguments import Array, Integers

ClassLosses = Callable[[Tensor], Tensor]
"""Outputs (rows, …) to the loss of each row for every possible label, (rows, K)."""

_ROWS = 4096  # of a model's outputs at a time


def ramp_then_linear(progress: float) -> float:
    """The share of the step size at ``progress`` in [0, 1]: up from 0 in the first 15 %, then down to 0, linearly.

    Source: arXiv 2102.06062, the MNIST family.
    """
    return progress / 0.15 if progress < 0.15 else (1 - progress) / 0.85


def ramp_then_steps(progress: float) -> float:
    """Up from 0 in the first 15 %, then a tenth from 30 %, 60 % and 90 % on. Source: arXiv 2102.06062, CIFAR."""
    return progress / 0.15 if progress < 0.15 else 0.1 ** sum(progress >= step for step in (0.3, 0.6, 0.9))


def constant(_: float) -> float:
    """The whole step size all the time."""
    return 1.0


@dataclass(frozen=True)
class Recipe:
    """SGD with Nesterov momentum (none at 0) over shuffled batches.

    ``schedule`` maps the share of the steps done to a share of ``step_size``. ``weight_decay`` is λ of λ/2·‖θ‖² on all
    parameters. ``mixup`` is α of Beta(α, α): one weight a batch, with which every row and its class weights are
    averaged with those of the reversed batch; None is no mixup.
    """

    epochs: int
    step_size: float
    batch_size: int
    momentum: float = 0.9
    weight_decay: float = 0.0
    mixup: float | None = None
    schedule: Callable[[float], float] = ramp_then_linear


def cross_entropy(outputs: Tensor) -> Tensor:
    """−ln softmax(outputs): the log-loss of every class, (rows, K)."""
    return -torch.log_softmax(outputs, dim=-1)


def class_losses(loss: Callable[[Tensor, Tensor], Tensor], classes: int) -> ClassLosses:
    """A task's ``loss`` (outputs, targets) at every target 0 … K − 1."""

    def every(outputs: Tensor) -> Tensor:
        rows, device = outputs.shape[0], outputs.device
        return torch.stack([loss(outputs, torch.full((rows,), z, device=device)) for z in range(classes)], dim=-1)

    return every


def fit_weighted(
    model: nn.Module,
    inputs: Tensor,
    weights: ArrayLike,
    recipe: Recipe,
    *,
    rng: np.random.Generator,
    losses: ClassLosses = cross_entropy,
) -> nn.Module:
    """A copy of ``model``, trained to minimize the mean over rows of Σ_z w_z·l(x, z).

    ``inputs`` (n, …) and ``weights`` (n, K) are those of ``mechanisms.labels.losses`` or ``weights.class_weights``.
    Weights may be negative: then a log-loss can be unbounded below, and ``weight_decay`` or few epochs must hold it.
    Rows whose weights are all 0 are left out. ``rng`` orders rows, draws mixup and seeds dropout; it is no noise for
    privacy. The model's device is used; inputs are moved to it batch by batch. Raises ``CoterieError`` for weights
    that do not fit the inputs.
    """
    table = torch.as_tensor(np.asarray(weights, np.float32))
    if table.ndim != 2 or len(table) != len(inputs):
        raise CoterieError(f"Expected weights (n, K) for {len(inputs)} rows, found shape {tuple(table.shape)}")
    used = np.flatnonzero(table.abs().sum(dim=1).numpy())

    def batch_loss(fitted: nn.Module, rows: Integers, device: torch.device) -> Tensor:
        chosen = torch.from_numpy(used[rows])
        x, w = inputs[chosen].to(device), table[chosen].to(device)
        if recipe.mixup is not None:
            share = float(rng.beta(recipe.mixup, recipe.mixup))
            x, w = share * x + (1 - share) * x.flip(0), share * w + (1 - share) * w.flip(0)
        return (w * losses(fitted(x))).sum(dim=1).mean()

    return _descend(model, len(used), batch_loss, recipe, rng)


def fit_bags(
    model: nn.Module, features: Tensor, bags: WeightedBags, recipe: Recipe, *, rng: np.random.Generator
) -> nn.Module:
    """A copy of ``model``, trained to minimize the mean over bags of (ȳ_j − Σ_i w_ji f(x_i))², for noisy-wtd-LLP.

    ``recipe.batch_size`` counts bags; the model's outputs are (rows,) or (rows, 1). No mixup. Source: arXiv
    2310.10092, Section 1.3.
    """
    if recipe.mixup is not None:
        raise CoterieError("Expected a recipe without mixup for bags, found one with it")
    weights = torch.as_tensor(bags.weights, dtype=torch.float32)
    sums = torch.as_tensor(bags.labels, dtype=torch.float32)

    def batch_loss(fitted: nn.Module, rows: Integers, device: torch.device) -> Tensor:
        members = torch.from_numpy(bags.members[rows])
        outputs = fitted(features[members.reshape(-1)].to(device)).reshape(members.shape)
        predicted = (weights[rows].to(device) * outputs).sum(dim=1)
        return torch.square(sums[rows].to(device) - predicted).mean()

    return _descend(model, len(sums), batch_loss, recipe, rng)


def outputs_of(model: nn.Module, inputs: Tensor) -> Array:
    """The model's outputs (n, …) in evaluation mode, batch by batch."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        parts = [model(part.to(device)).cpu() for part in torch.split(inputs, _ROWS)]
    return np.asarray(torch.cat(parts).numpy(), np.float64)


def _descend(
    model: nn.Module,
    count: int,
    batch_loss: Callable[[nn.Module, Integers, torch.device], Tensor],
    recipe: Recipe,
    rng: np.random.Generator,
) -> nn.Module:
    """A trained copy of ``model``; ``batch_loss`` gets the copy, places in 0 … ``count`` − 1, and the device."""
    fitted = copy.deepcopy(model).train()
    device = next(fitted.parameters()).device
    optimizer = torch.optim.SGD(
        fitted.parameters(),
        lr=recipe.step_size,
        momentum=recipe.momentum,
        nesterov=recipe.momentum > 0,
        weight_decay=recipe.weight_decay,
    )
    steps = recipe.epochs * -(-count // recipe.batch_size)
    done = 0
    with torch.random.fork_rng():
        torch.manual_seed(int(rng.integers(2**63 - 1)))
        for _ in range(recipe.epochs):
            order = rng.permutation(count)
            for start in range(0, count, recipe.batch_size):
                for group in optimizer.param_groups:
                    group["lr"] = recipe.step_size * recipe.schedule((done + 0.5) / steps)
                optimizer.zero_grad()
                batch_loss(fitted, order[start : start + recipe.batch_size], device).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                done += 1
    return fitted.eval()
