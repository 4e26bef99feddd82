"""FEMNIST: handwritten characters of NIST Special Database 19, one data holder per writer.

``--data`` names a LEAF json file, a folder of them (``all_data_0.json`` …), or an .npz file with ``image``
(uint8, ink 255 on paper 0), ``label`` and ``writer``. LEAF's pixels are 1 on paper and 0 in ink; they are
inverted, so that ink is 1 from either source. Labels: 0-9 digits, 10-35 upper case, 36-61 lower case.

With one data holder per writer, about half of them have their images turned 90° counter-clockwise, as in
arXiv 2206.03396, section 5.3. The paper tosses a coin for each client; here the coin is the last bit of
SHA-256's first 8 bytes of the writer's id, so that every process, at any time, agrees. The name says it:
``upright-f0010_18``, ``turned-f0011_04``. A file that is read as one data holder is never turned.

The model is the paper's 1,206,590-parameter network.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie.datasets.files import read_text, stem
from coterie.datasets.images import SIDE, check_images, image_client, read_npz
from coterie.datasets.losses import accuracy, as_percent, cross_entropy
from coterie.datasets.partition import choose_partition, mixed_order, name_hash
from coterie.errors import CoterieError
from coterie.tasks import Dataset, DataSource, Task, TrainingSettings, seeded_module

CLASSES = 62

Writers = Mapping[str, tuple[NDArray[Any], NDArray[Any]]]  # writer -> images (rows, 28, 28) and labels (rows,)


class CharacterNetwork(nn.Module):
    """Two 3×3 convolutions, max-pooling, two dense layers, dropout: 320 + 18,496 + 1,179,776 + 7,998
    parameters.

    The network of Reddi et al., "Adaptive Federated Optimization" (2021), for EMNIST, whose size is the
    paper's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(1, 32, 3)
        self.convolution2 = nn.Conv2d(32, 64, 3)
        self.hidden = nn.Linear(12 * 12 * 64, 128)
        self.output = nn.Linear(128, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(rows, 1, 28, 28) → (rows, 62)."""
        maps = torch.relu(self.convolution1(inputs))  # (rows, 32, 26, 26)
        maps = torch.relu(self.convolution2(maps))  # (rows, 64, 24, 24)
        maps = nn.functional.max_pool2d(maps, 2)  # (rows, 64, 12, 12)
        features = nn.functional.dropout(maps, 0.25, self.training).flatten(1)  # (rows, 9216)
        features = torch.relu(self.hidden(features))  # (rows, 128)
        outputs: torch.Tensor = self.output(nn.functional.dropout(features, 0.5, self.training))
        return outputs


def is_turned(writer: str) -> bool:
    """Whether a writer's images are turned: a public coin, the same in every process."""
    return name_hash(writer) % 2 == 1


def read(source: DataSource) -> Dataset:
    """Read LEAF json or .npz: one data holder, or one per ``writer`` in a fixed well-mixed order.

    Writers without an image are left out with a note. Raises ``CoterieError`` for a file that is not what
    it should be (with the place), and when no image is left.
    """
    partition = choose_partition(source.partition_by, ("writer",), "femnist")
    if source.path is None:
        raise CoterieError("Expected --data with LEAF json or an .npz file, found none")
    if source.path.is_dir():
        writers = _read_leaf_folder(source.path)
    elif source.path.suffix == ".npz":
        writers = _read_writers_npz(source.path)
    else:
        writers = _joined(read_leaf(source.path))
    empty = sum(not len(labels) for _, labels in writers.values())
    filled = {writer: rows for writer, rows in writers.items() if len(rows[1])}
    if not filled:
        raise CoterieError(f"Expected images in {source.path}, found none")
    notes = (f"{source.path.name}: {empty} writers left out: no image",) if empty else ()
    if partition is None:
        images = np.concatenate([images for images, _ in filled.values()])
        labels = np.concatenate([labels for _, labels in filled.values()])
        return Dataset((image_client(stem(source.path), images, labels, turned=False),), notes)
    clients = []
    for writer in mixed_order(filled):
        turned = is_turned(writer)
        name = f"{'turned' if turned else 'upright'}-{writer}"
        clients.append(image_client(name, *filled[writer], turned=turned))
    return Dataset(tuple(clients), notes)


def read_leaf(path: Path) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """The writers of one LEAF json file, with ink = 1. Raises ``CoterieError`` with the place."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CoterieError(f"Expected LEAF json in {path}, found: {error}") from error
    users = content.get("users") if isinstance(content, dict) else None
    user_data = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, list) or not isinstance(user_data, dict):
        found = ", ".join(repr(key)[:40] for key in list(content)[:5]) if isinstance(content, dict) else "no object"
        raise CoterieError(f"Expected LEAF json with 'users' and 'user_data' in {path}, found {found}")
    for user in users:
        rows = user_data.get(user) if isinstance(user, str) else None
        if not isinstance(rows, dict) or not isinstance(rows.get("x"), list) or not isinstance(rows.get("y"), list):
            raise CoterieError(f"Expected user_data with lists 'x' and 'y' for user {user!r} in {path}, found none")
        place = f"user {user!r} of {path}"
        try:
            images = np.array(rows["x"], dtype=np.float64).reshape(len(rows["x"]), SIDE, SIDE)
            labels = np.array(rows["y"]) if rows["y"] else np.empty(0, dtype=np.int64)
        except (ValueError, TypeError, OverflowError) as error:
            raise CoterieError(f"Expected rows of {SIDE * SIDE} numbers for {place}, found: {error}") from error
        check_images(images, labels, classes=CLASSES, place=place)
        yield user, (1 - images).astype(np.float32), labels


def _joined(parts: Iterator[tuple[str, NDArray[Any], NDArray[Any]]]) -> Writers:
    """A writer may be in several files, such as a training and a test part: the rows belong together."""
    images: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
    labels: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
    for writer, own_images, own_labels in parts:
        images[writer].append(own_images)
        labels[writer].append(own_labels)
    return {writer: (np.concatenate(images[writer]), np.concatenate(labels[writer])) for writer in images}


def _read_leaf_folder(folder: Path) -> Writers:
    files = sorted(path for path in folder.iterdir() if ".json" in path.suffixes)
    if not files:
        raise CoterieError(f"Expected LEAF json files in {folder}, found none")
    return _joined(writer for path in files for writer in read_leaf(path))


def _read_writers_npz(path: Path) -> Writers:
    arrays = read_npz(path, ("image", "label", "writer"))
    images, labels, writers = arrays["image"], arrays["label"], arrays["writer"]
    check_images(images, labels, classes=CLASSES, place=str(path))
    if writers.shape != labels.shape or writers.dtype.kind != "U":
        raise CoterieError(
            f"Expected one writer's name for each of {len(labels)} images in {path}, "
            f"found {writers.dtype} of shape {writers.shape}"
        )
    order = np.argsort(writers, kind="stable")
    names, starts = np.unique(writers[order], return_index=True)
    groups = np.split(order, starts[1:])
    return {str(name): (images[rows], labels[rows]) for name, rows in zip(names, groups, strict=True)}


def initialise(rng: np.random.Generator) -> CharacterNetwork:
    """One hypothesis: torch's default initial weights."""
    return seeded_module(CharacterNetwork, rng)


task = Task(
    name="femnist",
    build=CharacterNetwork,
    loss=cross_entropy,
    score=accuracy,
    metric="accuracy in %",
    higher_is_better=True,
    read=read,
    initialise=initialise,
    # Near the median norms of one epoch's updates from a random start, on the digits of 150 writers without
    # noise.
    clipping_norm={"convolution1": 0.1, "convolution2": 0.2, "hidden": 0.8, "output": 1.0},
    training=TrainingSettings(epochs=1, step_size=0.1, batch_size=10),
    report=as_percent,
    partitions=("writer",),
    needs_data=True,
    output_name="character",
)
