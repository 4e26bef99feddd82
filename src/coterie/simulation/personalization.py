"""What one held-out client gains from training its hypothesis on, by the deployed client's functions."""

import numpy as np
from torch import nn

from coterie.client.selection import best_hypothesis, hypothesis_losses, mean_loss, mean_score
from coterie.client.training import train
from coterie.parameters import Layout
from coterie.protocol import Vector
from coterie.tasks import ClientData, Task, TrainingSettings


def fine_tuned_score(
    task: Task,
    model: nn.Module,
    layout: Layout,
    hypotheses: Vector,
    data: tuple[ClientData, ClientData],
    training: TrainingSettings,
    *,
    rng: np.random.Generator,
) -> float:
    """The mean score on the second of two parts of a client's rows, after choosing and training on the first.

    As ``client.participation.keep_model`` does with all rows: the best of the hypotheses (k, n) is trained on, and
    what comes of it is kept if its mean loss on the same rows is less than before; else, as where training diverged,
    the hypothesis itself.
    """
    first, second = data
    losses = hypothesis_losses(task, model, hypotheses, layout, first)
    best = best_hypothesis(losses)
    tuned = train(task, model, hypotheses[best], layout, first, training, rng=rng)
    kept = tuned if mean_loss(task, model, tuned, layout, first) < losses[best] else hypotheses[best]
    return mean_score(task, model, kept, layout, second)
