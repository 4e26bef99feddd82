"""Local training: plain SGD from a hypothesis, in torch."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from coterie.parameters import Layout, as_tensors
from coterie.protocol import Vector
from coterie.tasks import ClientData, Task, TrainingSettings


class RoundOver(Exception):  # noqa: N818  (it names what happened)
    """Training was given up, since nobody waits for its result any more."""


def _never() -> bool:
    return False


def train(
    task: Task,
    model: nn.Module,
    start: Vector,
    layout: Layout,
    data: ClientData,
    settings: TrainingSettings,
    *,
    rng: np.random.Generator,
    is_over: Callable[[], bool] = _never,
) -> Vector:
    """``settings.epochs`` passes of SGD over shuffled batches, from ``start`` (n,); a new vector (n,).

    θ ← θ − s ∇ mean loss over the batch; the last batch of a pass may be smaller. ``rng`` orders the rows and
    seeds torch's generator (for dropout), whose global state is left as it was. Diverging training returns
    non-finite numbers: the gate decides what becomes of them. Raises ``RoundOver`` as soon as ``is_over()`` is true,
    asked after every batch, so that no server can keep a client busy for longer than it waits itself.
    """
    vector = torch.from_numpy(start.copy())
    # Views, tensor by tensor: the gradient of a part of the whole vector would be n numbers for each part.
    tensors = {name: view.requires_grad_() for name, view in as_tensors(vector, layout).items()}
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**63 - 1)))
        for _ in range(settings.epochs):
            order = torch.from_numpy(rng.permutation(data.rows))
            for batch in torch.split(order, settings.batch_size):
                out = functional_call(model, tensors, (data.inputs[batch],))
                loss = task.loss(out, data.targets[batch]).mean()
                gradients = torch.autograd.grad(loss, list(tensors.values()))
                with torch.no_grad():
                    for view, gradient in zip(tensors.values(), gradients, strict=True):
                        view.sub_(gradient, alpha=settings.step_size)
                if is_over():
                    raise RoundOver
    return vector.numpy()
