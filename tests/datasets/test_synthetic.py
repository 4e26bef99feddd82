from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.datasets import synthetic
from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.tasks import DataSource, TrainingSettings


def test_users_follow_their_group_s_law() -> None:
    clients = synthetic.read(DataSource(parts=100)).clients
    assert len(clients) == 100
    assert {client.rows for client in clients} == {10}
    for group, truth in enumerate(((5.0, 6.0), (4.0, -4.5))):
        own = clients[group::2]
        assert all(client.name.startswith(f"group{group + 1}-") for client in own)
        x = torch.cat([client.inputs for client in own]).double().numpy()
        y = torch.cat([client.targets for client in own]).double().numpy()
        fitted, residual, _, _ = np.linalg.lstsq(x, y, rcond=None)
        # The standard error of a coefficient is 0.5/√500 = 0.022: six of them.
        assert np.abs(fitted[:, 0] - truth).max() < 0.14
        # 2·(residual sum)/σ² ~ χ²(498): its standard deviation is 6.3 % of its mean, so 40 % is beyond six.
        assert float(residual[0]) == pytest.approx(498 * 0.25, rel=0.4)
        assert np.abs(x.mean(0)).max() < 0.27  # 6/√500
        assert x.std() == pytest.approx(1, abs=0.14)


def test_a_user_is_the_same_among_few_and_many() -> None:
    few = synthetic.read(DataSource(parts=3)).clients
    many = synthetic.read(DataSource(parts=50)).clients
    for one, other in zip(few, many, strict=False):
        assert one.name == other.name
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
    assert not torch.equal(few[0].inputs, few[1].inputs)


def test_model_has_exactly_two_parameters() -> None:
    assert layout_of(synthetic.task.build()).size == 2
    assert synthetic.task.training == TrainingSettings(epochs=1, step_size=0.1, batch_size=10)


def test_hypotheses_are_standard_normal() -> None:
    rng = np.random.default_rng(0)
    drawn = np.array([synthetic.initialise(rng).linear.weight.detach().numpy().ravel() for _ in range(2000)])
    assert np.abs(drawn.mean(0)).max() < 6 / np.sqrt(2000)
    assert drawn.var(0) == pytest.approx(1, abs=6 * np.sqrt(2 / 2000))


def test_loss_and_report_are_squared_error_and_its_root() -> None:
    outputs, targets = torch.tensor([[1.0], [5.0]]), torch.tensor([[3.0], [5.0]])
    assert synthetic.task.loss(outputs, targets).tolist() == [4.0, 0.0]
    assert synthetic.task.report(4.0) == 2.0


def test_bad_sources() -> None:
    with pytest.raises(CoterieError, match="no --data for synthetic"):
        synthetic.read(DataSource(Path("x.csv")))
    with pytest.raises(CoterieError, match="at least 1 user, found 0"):
        synthetic.read(DataSource(parts=0))
    with pytest.raises(CoterieError, match="--partition-by for synthetic"):
        synthetic.read(DataSource(partition_by="zip"))
