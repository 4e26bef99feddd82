from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from coterie.datasets import digits
from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.tasks import DataSource


def test_all_images_are_dealt_and_every_second_holder_s_are_turned() -> None:
    clients = digits.read(DataSource(parts=20)).clients
    assert [client.name for client in clients[:4]] == ["upright-01", "turned-02", "upright-03", "turned-04"]
    bunch = load_digits()
    known = {image.tobytes(): label for image, label in zip(bunch.images, bunch.target, strict=True)}
    seen = 0
    for client in clients:
        images = np.rint(16 * client.inputs.double().numpy().reshape(-1, 8, 8))
        # Turning clockwise must give the published image back: rot90 with k=-1, by hand on a transposed copy.
        upright = images if client.name.startswith("upright") else images.transpose(0, 2, 1)[:, :, ::-1]
        for image, label in zip(upright, client.targets.tolist(), strict=True):
            assert known[np.ascontiguousarray(image).tobytes()] == label
            seen += 1
    assert seen == len(bunch.images) == 1797


def test_inputs_are_between_0_and_1() -> None:
    (client,) = digits.read(DataSource()).clients
    assert client.inputs.min() == 0
    assert client.inputs.max() == 1
    assert client.inputs.dtype == torch.float32


def test_one_shared_model_is_clearly_worse_than_two() -> None:
    clients = digits.read(DataSource(parts=20)).clients

    def accuracy(chosen: range) -> float:
        """Of a central fit on the first 14 of 20 holders, tested on the other 6, within ``chosen``."""
        train = [clients[i] for i in chosen if i < 14]
        test = [clients[i] for i in chosen if i >= 14]
        model = LogisticRegression(max_iter=1000)
        model.fit(torch.cat([c.inputs for c in train]).numpy(), torch.cat([c.targets for c in train]).numpy())
        return float(
            model.score(torch.cat([c.inputs for c in test]).numpy(), torch.cat([c.targets for c in test]).numpy())
        )

    shared = accuracy(range(20))
    two = (accuracy(range(0, 20, 2)) + accuracy(range(1, 20, 2))) / 2
    assert two - shared > 0.04


def test_model_and_report() -> None:
    assert layout_of(digits.task.build()).size == 650
    outputs = torch.eye(10)[[3, 4]]
    assert digits.task.score(outputs, torch.tensor([3, 5])).tolist() == [1.0, 0.0]
    assert digits.task.report(0.25) == 25.0
    assert digits.task.loss(torch.zeros(1, 10), torch.tensor([3])).item() == pytest.approx(np.log(10))


def test_hypotheses_start_at_torchs_default() -> None:
    parameters = torch.cat([p.detach().ravel() for p in digits.initialise(np.random.default_rng(0)).parameters()])
    # Uniform on ±1/√64: of 650 draws the largest is below 0.12 with probability 0.96^650 < 1e-11.
    assert 0.12 < parameters.abs().max().item() <= 0.125


def test_bad_sources() -> None:
    with pytest.raises(CoterieError, match="no --data for digits"):
        digits.read(DataSource(Path("x")))
    with pytest.raises(CoterieError, match="between 1 and 1797 parts"):
        digits.read(DataSource(parts=1798))
