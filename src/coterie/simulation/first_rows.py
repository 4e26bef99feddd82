"""What a task's own functions say of the first rows: checked before anything runs, and a mark of what they compute."""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.rng import seeded
from coterie.simulation.programs import CPU, torch_seeded
from coterie.simulation.rows import Rows
from coterie.tasks import Task

_ROWS = 16


def losses_and_scores(task: Task, rows: Rows) -> tuple[Tensor, Tensor]:
    """Losses and scores (rows,) of the first 16 rows, by a hypothesis of a fixed seed, on the CPU.

    Raises ``CoterieError`` unless each is one value for each row.
    """
    inputs, targets = rows.inputs[:_ROWS].to(CPU), rows.targets[:_ROWS].to(CPU)
    with torch_seeded(0, CPU), torch.no_grad():
        outputs = task.initialise(seeded(0, "simulation", "first rows")).eval()(inputs)
        return _values(task, "loss", task.loss, outputs, targets), _values(task, "score", task.score, outputs, targets)


def _values(
    task: Task, name: str, function: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor
) -> Tensor:
    values = function(outputs, targets)
    wanted = (len(targets),)
    found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
    if found != f"shape {wanted}":
        raise CoterieError(
            f"Expected the {name} of task {task.name!r} to be one value for each row, shape {wanted} for {wanted[0]} "
            f"rows, found {found}: reduce over all dimensions but the rows'"
        )
    return values
