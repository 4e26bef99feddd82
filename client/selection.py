"""Which hypothesis fits a data holder's rows."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from coterie.parameters import Layout, as_tensors
from coterie.protocol import Vector
from coterie.tasks import ClientData, Task

# Convolutional tasks would hold every activation of a large client at once.
_ROWS_AT_ONCE = 100


def outputs(model: nn.Module, vector: Vector, layout: Layout, inputs: Tensor) -> Tensor:
    """The model's outputs in evaluation mode under the parameters ``vector`` (n,), shape (rows, …)."""
    tensors = as_tensors(torch.from_numpy(vector), layout)
    model.eval()
    with torch.no_grad():
        chunks = [functional_call(model, tensors, (chunk,)) for chunk in torch.split(inputs, _ROWS_AT_ONCE)]
    return torch.cat(chunks)


def mean_loss(task: Task, model: nn.Module, vector: Vector, layout: Layout, data: ClientData) -> float:
    """The mean loss of the parameters ``vector`` over a data holder's rows."""
    return float(task.loss(outputs(model, vector, layout, data.inputs), data.targets).double().mean())


def mean_score(task: Task, model: nn.Module, vector: Vector, layout: Layout, data: ClientData) -> float:
    """The mean score of the parameters ``vector`` over a data holder's rows."""
    return float(task.score(outputs(model, vector, layout, data.inputs), data.targets).double().mean())


def hypothesis_losses(
    task: Task, model: nn.Module, hypotheses: Vector, layout: Layout, data: ClientData
) -> NDArray[np.float64]:
    """The mean loss of each of the k hypotheses (k, n) on a data holder's rows, shape (k,)."""
    return np.array([mean_loss(task, model, vector, layout, data) for vector in hypotheses])


def best_hypothesis(losses: NDArray[np.float64]) -> int:
    """argmin_j of the losses; a non-finite loss is the worst, ties go to the lowest index (IFCA)."""
    return int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
