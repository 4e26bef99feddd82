"""The workloads of ``simulation.py``: synthetic rows in the shape of the paper's tasks."""

from dataclasses import replace

import numpy as np
import torch

from coterie.rng import seeded
from coterie.simulation.rows import Counts, Rows
from coterie.tasks import ClientData, Task, load_task

H_CLIENTS, H_HYPOTHESES, H_SAMPLED = 2947, 3, 100
F_CLIENTS, F_IMAGES, F_HYPOTHESES, F_SAMPLED, F_BATCH = 200, 100, 2, 10, 32


def hospitals(clients: int) -> tuple[Task, Rows]:
    """The hospital task in one epoch, and clients of 3 to 5 rows of three inputs, with three levels of price.

    Made in one piece and without a Python object a client, so that a million of them take a second.
    """
    rng = seeded(1, "workload H")
    counts: Counts = rng.integers(3, 6, clients)
    rows = int(counts.sum())
    inputs = rng.uniform(-1, 1, (rows, 3)).astype(np.float32)
    level = np.repeat(0.6 + 0.5 * (np.arange(clients) % 3), counts)
    noise = 0.05 * rng.standard_normal(rows)
    targets = (level + inputs @ np.array([0.1, 0.2, -0.1]) + noise).astype(np.float32)[:, None]
    names = tuple(f"h{index}" for index in range(clients))
    task = load_task("hospital")
    one_epoch = replace(task, training=replace(task.training, epochs=1))
    return one_epoch, Rows(
        names, torch.from_numpy(inputs), torch.from_numpy(targets), np.cumsum(counts) - counts, counts
    )


def characters() -> tuple[Task, Rows]:
    """The femnist task in batches of 32, and clients of 100 images 28×28 of 62 classes; every other client's are
    upside down.

    A class is a smooth random image; an image is its class's and noise.
    """
    rng = seeded(1, "workload F")
    coarse = torch.from_numpy(rng.standard_normal((62, 1, 7, 7)).astype(np.float32))
    classes = torch.nn.functional.interpolate(coarse, size=(28, 28), mode="bilinear")
    clients = []
    for index in range(F_CLIENTS):
        labels = torch.from_numpy(rng.integers(0, 62, F_IMAGES))
        noise = torch.from_numpy(rng.standard_normal((F_IMAGES, 1, 28, 28)).astype(np.float32))
        images = torch.sigmoid(2 * classes[labels] + noise)
        clients.append(ClientData(f"f{index}", torch.rot90(images, 2, (2, 3)) if index % 2 else images, labels))
    task = load_task("femnist")
    return replace(task, training=replace(task.training, epochs=1, batch_size=F_BATCH)), Rows.of(clients)
