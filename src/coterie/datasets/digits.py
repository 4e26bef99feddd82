"""scikit-learn's bundled handwritten digits: 1,797 images of 8×8 pixels, nothing to download.

The images are dealt to ``parts`` data holders and every second one's are turned 90° counter-clockwise, as
the paper does with FEMNIST, so that there are two groups for whom one shared model is a poor compromise. A
data holder's name tells its group: ``upright-01``, ``turned-02``.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from coterie.datasets.losses import accuracy, as_percent, cross_entropy
from coterie.datasets.partition import choose_partition, deal, numbered
from coterie.errors import CoterieError
from coterie.tasks import ClientData, Dataset, DataSource, Task, TrainingSettings, seeded_module

PIXEL_MAXIMUM = 16.0  # the images' published range is 0..16
CLASSES = 10


class SoftmaxClassifier(nn.Module):
    """Linear 64 → 10, 650 parameters; softmax is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(rows, 64) → (rows, 10)."""
        outputs: torch.Tensor = self.linear(inputs)
        return outputs


def read(source: DataSource) -> Dataset:
    """The images dealt to ``source.parts`` data holders: a fixed deal, every second one turned."""
    choose_partition(source.partition_by, ("index",), "digits")
    if source.path is not None:
        raise CoterieError(f"Expected no --data for digits, which come with scikit-learn, found {source.path}")
    bunch = load_digits()
    images = bunch.images / PIXEL_MAXIMUM  # (1797, 8, 8) in [0, 1]
    labels = bunch.target
    clients = []
    for part, rows in enumerate(deal(len(images), source.parts)):
        turned = part % 2 == 1
        own = np.rot90(images[rows], axes=(1, 2)) if turned else images[rows]
        inputs = torch.tensor(np.ascontiguousarray(own).reshape(len(rows), 64), dtype=torch.float32)
        targets = torch.tensor(labels[rows], dtype=torch.int64)
        clients.append(ClientData(numbered("turned" if turned else "upright", part, source.parts), inputs, targets))
    return Dataset(tuple(clients))


def initialise(rng: np.random.Generator) -> nn.Module:
    """One hypothesis: torch's default initial weights."""
    return seeded_module(SoftmaxClassifier, rng)


task = Task(
    name="digits",
    build=SoftmaxClassifier,
    loss=cross_entropy,
    score=accuracy,
    metric="accuracy in %",
    higher_is_better=True,
    read=read,
    initialise=initialise,
    # By a simulated trial with 20 data holders: at ν = 3 a smaller radius learns more slowly, at no gain.
    clipping_norm=2.0,
    training=TrainingSettings(epochs=5, step_size=0.5, batch_size=10),
    report=as_percent,
    partitions=("index",),
    output_name="digit",
)
