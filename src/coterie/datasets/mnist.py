"""MNIST: 60,000 training images of digits, dealt to data holders, every second one's turned.

``--data`` names a folder with the public idx files (``train-images-idx3-ubyte`` and
``train-labels-idx1-ubyte``, gzipped or not), or an .npz file with ``x_train`` and ``y_train``. Only the
training images are dealt; the 10,000 test images are left to whoever evaluates. The images of every second
data holder are turned 90° counter-clockwise, as with ``digits``.

The model is Linear(784, 32) - tanh - Linear(32, 10), 25,450 parameters: small, and smooth, so that it also
serves attacks that differentiate a gradient, which a ReLU model would make look harder than they are.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie.datasets.files import read_bytes
from coterie.datasets.images import SIDE, check_images, image_client, read_npz
from coterie.datasets.losses import accuracy, as_percent, cross_entropy
from coterie.datasets.partition import choose_partition, deal, numbered
from coterie.errors import CoterieError
from coterie.tasks import Dataset, DataSource, Task, TrainingSettings, seeded_module

CLASSES = 10
HIDDEN = 32
IMAGES_FILE = "train-images-idx3-ubyte"
LABELS_FILE = "train-labels-idx1-ubyte"
UNSIGNED_BYTE = 0x08  # the idx format's code for the element type


class SmoothClassifier(nn.Module):
    """Linear(784, 32) - tanh - Linear(32, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(SIDE * SIDE, HIDDEN)
        self.output = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(rows, 1, 28, 28) → (rows, 10)."""
        outputs: torch.Tensor = self.output(torch.tanh(self.hidden(inputs.flatten(1))))
        return outputs


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes: two zero bytes, type, dimensions, sizes as big-endian
    uint32, data.

    Raises ``CoterieError`` for another type, another number of dimensions, and data that are too short or
    too long.
    """
    content = read_bytes(path)
    start = 4 * (1 + dimensions)
    if content[:4] != bytes((0, 0, UNSIGNED_BYTE, dimensions)) or len(content) < start:
        raise CoterieError(
            f"Expected an idx file of {dimensions}-dimensional unsigned bytes at {path}, "
            f"found one that begins with {content[:4].hex(' ')}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    expected = int(np.prod(shape, dtype=object))
    if len(content) - start != expected:
        raise CoterieError(f"Expected {expected} bytes of data in {path}, found {len(content) - start}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def read_arrays(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Training images (N, 28, 28) and labels (N,) of a folder of idx files or of an .npz file, checked."""
    if path.is_dir():
        images, labels = read_idx(_either(path, IMAGES_FILE), 3), read_idx(_either(path, LABELS_FILE), 1)
    elif path.suffix == ".npz" or not path.exists():
        arrays = read_npz(path, ("x_train", "y_train"))
        images, labels = arrays["x_train"], arrays["y_train"]
    else:
        raise CoterieError(f"Expected --data for mnist to be a folder of idx files or an .npz file, found {path}")
    check_images(images, labels, classes=CLASSES, place=str(path))
    return images, labels


def _either(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.exists():
            return path
    raise CoterieError(f"Expected {name}.gz or {name} in {folder}, found neither; coterie data fetch mnist gets them")


def read(source: DataSource) -> Dataset:
    """The training images dealt to ``source.parts`` data holders: a fixed deal, every second one turned."""
    choose_partition(source.partition_by, ("index",), "mnist")
    if source.path is None:
        raise CoterieError("Expected --data with MNIST's idx files or an .npz file, found none")
    images, labels = read_arrays(source.path)
    if not len(images):
        raise CoterieError(f"Expected images in {source.path}, found none")
    clients = []
    for part, rows in enumerate(deal(len(images), source.parts)):
        turned = part % 2 == 1
        name = numbered("turned" if turned else "upright", part, source.parts)
        clients.append(image_client(name, images[rows], labels[rows], turned=turned))
    return Dataset(tuple(clients))


def initialise(rng: np.random.Generator) -> SmoothClassifier:
    """One hypothesis: torch's default initial weights."""
    return seeded_module(SmoothClassifier, rng)


task = Task(
    name="mnist",
    build=SmoothClassifier,
    loss=cross_entropy,
    score=accuracy,
    metric="accuracy in %",
    higher_is_better=True,
    read=read,
    initialise=initialise,
    # Near the median norms of one epoch's updates of 600 data holders without noise.
    clipping_norm={"hidden": 0.6, "output": 0.3},
    training=TrainingSettings(epochs=1, step_size=0.1, batch_size=10),
    report=as_percent,
    partitions=("index",),
    needs_data=True,
    output_name="digit",
)
