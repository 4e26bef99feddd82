import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.datasets import femnist
from coterie.datasets.partition import name_hash
from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.tasks import DataSource

# Public coins: SHA-256 of these begins with 8 bytes that end in an even and an odd one.
UPRIGHT, TURNED = "f0004_03", "f0001_41"


def leaf_image(ink: tuple[int, int]) -> list[float]:
    """White paper (1) with one black pixel (0) at (row, column)."""
    image = np.ones((28, 28))
    image[ink] = 0
    return image.ravel().tolist()


def write_leaf(path: Path, users: dict[str, tuple[list[list[float]], list[Any]]]) -> Path:
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    return write_leaf(
        tmp_path / "all_data_0.json",
        {UPRIGHT: ([leaf_image((2, 5)), leaf_image((0, 0))], [61, 3]), TURNED: ([leaf_image((2, 5))], [10])},
    )


def by_writer(path: Path) -> dict[str, Any]:
    return {client.name: client for client in femnist.read(DataSource(path, "writer")).clients}


def test_leaf_json_is_inverted_and_half_of_the_writers_turned(leaf: Path) -> None:
    assert name_hash(UPRIGHT) % 2 == 0
    assert name_hash(TURNED) % 2 == 1
    clients = by_writer(leaf)
    upright, turned = clients[f"upright-{UPRIGHT}"], clients[f"turned-{TURNED}"]
    assert upright.inputs.shape == (2, 1, 28, 28)
    assert upright.targets.tolist() == [61, 3]
    # Ink is 1 and paper 0.
    assert upright.inputs[0].sum() == 1
    assert upright.inputs[0, 0, 2, 5] == 1
    # A quarter turn counter-clockwise takes (row, column) to (27 - column, row).
    assert turned.inputs[0, 0, 22, 2] == 1
    assert turned.inputs.sum() == 1
    assert turned.targets.tolist() == [10]


def test_a_file_as_one_data_holder_is_never_turned(leaf: Path) -> None:
    (client,) = femnist.read(DataSource(leaf)).clients
    assert client.name == "all_data_0"
    assert client.inputs.shape == (3, 1, 28, 28)
    assert client.inputs[2, 0, 2, 5] == 1


def test_a_folder_of_json_joins_a_writer_s_rows(leaf: Path) -> None:
    write_leaf(leaf.with_name("all_data_1.json"), {TURNED: ([leaf_image((1, 1))], [11]), "third": ([], [])})
    data = femnist.read(DataSource(leaf.parent, "writer"))
    assert {client.name: client.rows for client in data.clients} == {f"upright-{UPRIGHT}": 2, f"turned-{TURNED}": 2}
    assert data.notes == (f"{leaf.parent.name}: 1 writers left out: no image",)


def test_npz_agrees_with_leaf(leaf: Path) -> None:
    image = np.zeros((3, 28, 28), dtype=np.uint8)
    image[0, 2, 5] = image[1, 2, 5] = image[2, 0, 0] = 255
    path = leaf.with_name("x.npz")
    # Rows of different writers may be mixed.
    np.savez(path, image=image, label=[61, 10, 3], writer=[UPRIGHT, TURNED, UPRIGHT])
    ours, theirs = by_writer(path), by_writer(leaf)
    assert ours.keys() == theirs.keys()
    for name, client in ours.items():
        assert torch.equal(client.inputs, theirs[name].inputs)
        assert torch.equal(client.targets, theirs[name].targets)


def test_real_digits(real_data: Path) -> None:
    path = real_data / "femnist_digits.npz"
    clients = by_writer(path)
    assert len(clients) == 150
    assert sum(client.rows for client in clients.values()) == 14493
    turned = sum(name.startswith("turned") for name in clients)
    assert 45 < turned < 105  # Binomial(150, 1/2): five standard deviations
    # Mostly paper, which is 0.
    assert all(client.inputs.mean() < 0.5 for client in clients.values())


def test_network_has_the_paper_s_size_layer_by_layer() -> None:
    layout = layout_of(femnist.task.build())
    sizes = {layer.name: layer.size for layer in layout.layers}
    assert list(sizes.values()) == [320, 18_496, 1_179_776, 7_998]
    assert layout.size == 1_206_590
    assert isinstance(femnist.task.clipping_norm, dict)
    assert set(femnist.task.clipping_norm) == set(sizes)


def test_dropout_works_in_training_only() -> None:
    network = femnist.initialise(np.random.default_rng(0))
    inputs = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert network.train()(inputs).shape == (2, 62)
    assert not torch.equal(network.train()(inputs), network.train()(inputs))
    assert torch.equal(network.eval()(inputs), network.eval()(inputs))


def message(path: Path) -> str:
    with pytest.raises(CoterieError) as caught:
        femnist.read(DataSource(path, "writer"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (1.5, "1.5"), (-1, "-1")])
def test_a_pixel_that_is_none_is_named_with_its_place(tmp_path: Path, value: float, shown: str) -> None:
    image = leaf_image((0, 0))
    image[28 * 3 + 4] = value
    path = write_leaf(tmp_path / "x.json", {"w": ([leaf_image((0, 0)), image], [1, 2])})
    assert f"user 'w' of {path}, found {shown}" in message(path)
    assert "at row 1, pixel (3, 4)" in message(path)


@pytest.mark.parametrize("labels", [[62], [-1], ["a"], [1.5], [1, 2], [], [[1]], [None], [10**30]])
def test_labels_that_are_none(tmp_path: Path, labels: list[Any]) -> None:
    path = write_leaf(tmp_path / "x.json", {"w": ([leaf_image((0, 0))], labels)})
    assert "'w'" in message(path)


@pytest.mark.parametrize("x", [[[1.0]], [[1.0] * 785], ["a"], [[10**400]], [[[1.0]] * 784 + [1.0]], [1.0, [2.0]]])
def test_rows_that_are_no_images(tmp_path: Path, x: list[Any]) -> None:
    assert "'w'" in message(write_leaf(tmp_path / "x.json", {"w": (x, [1] * len(x))}))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"users": 1, "user_data": {}}',
        '{"users": ["a"], "user_data": {}}',
        "[" * 10**5,
        '{"users": [["a"]], "user_data": {}}',
        '{"users": ["a"], "user_data": {"a": {"x": 1, "y": []}}}',
        '{"users": [], "user_data": {}}',
    ],
)
def test_json_that_is_not_leaf_s(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert str(path) in message(path)


def test_writers_without_images_only(tmp_path: Path) -> None:
    assert "Expected images in" in message(write_leaf(tmp_path / "x.json", {"w": ([], [])}))
    (tmp_path / "empty").mkdir()
    assert "Expected LEAF json files in" in message(tmp_path / "empty")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image": np.zeros((2, 28, 27), np.uint8)}, r"shape \(N, 28, 28\)"),
        ({"image": np.zeros((2, 28, 28), np.int64)}, "type uint8 or float"),
        ({"label": np.array([0.5, 1])}, "one integer label"),
        ({"label": np.array([0, 62])}, "found 62 at row 1"),
        ({"writer": np.array([1, 2])}, "one writer's name"),
        ({"writer": np.array(["a"])}, "one writer's name"),
    ],
)
def test_npz_arrays_that_do_not_fit(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    arrays: dict[str, Any] = {"image": np.zeros((2, 28, 28), np.uint8), "label": [0, 1], "writer": ["a", "b"]}
    path = tmp_path / "x.npz"
    np.savez(path, **(arrays | change))
    with pytest.raises(CoterieError, match=said):
        femnist.read(DataSource(path, "writer"))


def test_npz_with_other_keys_and_no_path(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x_train=[1])
    assert message(path) == f"Expected arrays image, label, writer in {path}, found x_train"
    with pytest.raises(CoterieError, match="Expected --data"):
        femnist.read(DataSource())
    with pytest.raises(CoterieError, match="for femnist to be one of writer"):
        femnist.read(DataSource(path, "provider"))
