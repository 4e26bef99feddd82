import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.datasets import mnist
from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.tasks import DataSource


def idx(array: np.ndarray) -> bytes:
    """An idx file by the format's description, written without the reader's code."""
    return b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, images: np.ndarray) -> Path:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(12, dtype=np.uint8) % 10)))
    return tmp_path


def test_idx_files_and_npz_agree(folder: Path, images: np.ndarray) -> None:
    path = folder / "mnist.npz"
    np.savez(path, x_train=images, y_train=np.arange(12) % 10, x_test=images, y_test=np.arange(12))
    ours = mnist.read(DataSource(folder, parts=3)).clients
    theirs = mnist.read(DataSource(path, parts=3)).clients
    assert [client.name for client in ours] == ["upright-01", "turned-02", "upright-03"]
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


def test_every_second_holder_s_images_are_turned(folder: Path, images: np.ndarray) -> None:
    upright, turned = mnist.read(DataSource(folder, parts=2)).clients
    for client, quarter_turns in ((upright, 0), (turned, -1)):
        for image, label in zip(client.inputs.numpy()[:, 0], client.targets.tolist(), strict=True):
            back = np.rint(np.rot90(image, quarter_turns) * 255).astype(np.uint8)
            row = int(np.flatnonzero((images == back).all((1, 2)))[0])
            assert label == row % 10
    assert upright.rows == turned.rows == 6


def test_real_images(real_data: Path) -> None:
    data = mnist.read(DataSource(real_data / "mnist.npz", "index", parts=100))
    assert {client.rows for client in data.clients} == {600}
    assert data.clients[0].inputs.max() == 1


def test_model_is_smooth_and_small() -> None:
    assert layout_of(mnist.task.build()).size == 784 * 32 + 32 + 32 * 10 + 10
    assert mnist.initialise(np.random.default_rng(0))(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00\x08",
        b"\x00\x00\x08\x03",
        b"\x00\x00\x0d\x03" + bytes(12),
        b"\x00\x00\x08\x01\x00\x00\x00\x00",
        b"\x00\x00\x08\x03" + struct.pack(">3I", 2, 28, 28) + bytes(5),
        b"\x00\x00\x08\x03" + b"\xff" * 12 + bytes(5),
        b"\x00\x00\x08\x03" + struct.pack(">3I", 1, 28, 28) + bytes(28 * 28 + 1),
    ],
)
def test_idx_files_that_are_none(folder: Path, content: bytes) -> None:
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(CoterieError, match=str(path)):
        mnist.read(DataSource(folder))


def test_folders_and_files_that_do_not_fit(folder: Path) -> None:
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(CoterieError, match=r"Expected train-labels-idx1-ubyte.gz or train-labels-idx1-ubyte in"):
        mnist.read(DataSource(folder))
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(11, np.uint8)))
    with pytest.raises(CoterieError, match="one integer label for each of 12 images"):
        mnist.read(DataSource(folder))
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(np.full(12, 10, np.uint8)))
    with pytest.raises(CoterieError, match=r"labels 0 to 9 .*found 10 at row 0"):
        mnist.read(DataSource(folder))
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(12, np.uint8)))
    with pytest.raises(CoterieError, match="between 1 and 12 parts"):
        mnist.read(DataSource(folder, parts=13))
    with pytest.raises(CoterieError, match=r"a folder of idx files or an .npz file"):
        mnist.read(DataSource(folder / "train-images-idx3-ubyte"))
    with pytest.raises(CoterieError, match="found none"):
        mnist.read(DataSource(folder / "nope"))
    with pytest.raises(CoterieError, match="Expected --data"):
        mnist.read(DataSource())
