"""A data holder's folder: one client each, one process at a time, one ledger over all starts."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.client.assembly import client_folder, data_holder, deployed_draws, read_dataset
from coterie.client.ledger import LEDGER_FILE, Ledger
from coterie.client.participation import DataHolder
from coterie.config import ClientSettings
from coterie.errors import CoterieError
from coterie.mechanisms.selection import ExponentialSelection, RandomizedArgmin
from coterie.rng import SecureGenerator
from coterie.tasks import ClientData, Dataset, DataSource, Task, load_task

Holder = Callable[..., DataHolder]


def settings(tmp_path: Path, **changes: object) -> ClientSettings:
    values = {"task": "tiny", "state": tmp_path / "state", "noise_multiplier": 3.0, "budget": 10.0, **changes}
    return ClientSettings.model_validate(values)


def test_real_noise_comes_from_the_operating_system() -> None:
    first, second = deployed_draws(1), deployed_draws(1)
    assert isinstance(first.noise, SecureGenerator)
    a, b = np.empty(8), np.empty(8)
    assert not np.array_equal(first.noise.standard_normal(out=a), second.noise.standard_normal(out=b))
    assert not np.array_equal(first.order.permutation(1000), second.order.permutation(1000))


def test_a_deployed_holder_takes_real_noise_without_being_told(
    tmp_path: Path, tiny_task: Task, rows: ClientData
) -> None:
    with data_holder(settings(tmp_path), tiny_task, rows) as holder:
        assert holder.draws is deployed_draws


def test_the_folder_is_private_and_used_by_one_process_at_a_time(
    tmp_path: Path, tiny_task: Task, rows: ClientData
) -> None:
    mine = settings(tmp_path)
    with data_holder(mine, tiny_task, rows):
        assert (tmp_path / "state").stat().st_mode & 0o077 == 0
        code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = [sys.executable, "-c", code, tmp_path / "state" / "lock"]
        assert subprocess.run(other, capture_output=True, check=False).returncode != 0
        with pytest.raises(CoterieError, match="one client at a time"), data_holder(mine, tiny_task, rows):
            pass
    with data_holder(mine, tiny_task, rows) as again:
        assert again.name == "ward 7"


def test_state_that_cannot_be_a_folder_is_one_line(tmp_path: Path, tiny_task: Task, rows: ClientData) -> None:
    (tmp_path / "file").write_text("")
    bad = settings(tmp_path, state=tmp_path / "file" / "state")
    with pytest.raises(CoterieError, match="--state to be a writable folder"), data_holder(bad, tiny_task, rows):
        pass


def test_a_start_is_noted_once_for_equal_settings_and_again_for_others(
    tmp_path: Path, tiny_task: Task, rows: ClientData
) -> None:
    def starts() -> int:
        with Ledger(tmp_path / "state" / LEDGER_FILE, create=False) as ledger:
            return int(ledger._connection.execute("SELECT count(*) FROM sessions").fetchone()[0])

    other_rows = ClientData("ward 7", rows.inputs + 1, rows.targets)
    for changes, data, expected in [({}, rows, 1), ({}, rows, 1), ({"budget": 11.0}, rows, 2), ({}, other_rows, 3)]:
        with data_holder(settings(tmp_path, **changes), tiny_task, data) as holder:
            session = holder.gate.ledger.latest_session()
            assert session is not None
            assert session.budget == holder.gate.budget
        assert starts() == expected


def test_the_gate_holds_to_the_settings(open_holder: Holder) -> None:
    gate = open_holder(
        selection="exponential",
        selection_epsilon=0.5,
        selection_loss_bound=2.0,
        validation=False,
        share_sample_count=True,
        budget=7.0,
    ).gate
    assert gate.selection == ExponentialSelection(0.5, 2.0)
    assert (gate.validation, gate.share_sample_count, gate.budget) == (False, True, 7.0)
    assert gate.policy.radii == (0.5, 0.25)


def test_randomized_selection_is_built(open_holder: Holder) -> None:
    assert open_holder(selection="randomized", selection_epsilon=0.5).gate.selection == RandomizedArgmin(0.5)


def test_a_single_holder_has_the_folder_itself_and_a_fleet_one_each(tmp_path: Path) -> None:
    assert client_folder(settings(tmp_path), "ward 7") == tmp_path / "state"
    fleet = settings(tmp_path, fleet=3)
    names = ["ward 7", "ward/7", "ward_7", "é", "è", "..", ".", "../../x", "WARD 7"]
    folders = [client_folder(fleet, name) for name in names]
    assert all(folder.parent == tmp_path / "state" for folder in folders), folders
    assert all(folder.name not in {".", ".."} for folder in folders)
    # Two data holders in one folder would share a key and a budget, or keep each other out.
    assert len(set(folders)) == len(names), sorted(folder.name for folder in folders)


def test_a_fleet_is_the_first_holders_in_the_tasks_order() -> None:
    task = load_task("synthetic")
    base = {"task": "synthetic", "state": Path("s"), "noise_multiplier": 3.0, "budget": 10.0}
    three = read_dataset(ClientSettings.model_validate({**base, "fleet": 3}), task)
    five = read_dataset(ClientSettings.model_validate({**base, "fleet": 5}), task)
    assert [c.name for c in five.clients[:3]] == [c.name for c in three.clients]
    assert torch.equal(five.clients[2].inputs, three.clients[2].inputs)


def fake_task(tiny_task: Task, *clients: ClientData, needs_data: bool = False) -> Task:
    def read(source: DataSource) -> Dataset:
        return Dataset(clients)

    return Task(**{**vars(tiny_task), "read": read, "needs_data": needs_data, "partitions": ("index", "ward")})


def test_what_cannot_be_read_is_one_line_each(tmp_path: Path, tiny_task: Task, rows: ClientData) -> None:
    empty = ClientData("ward 8", rows.inputs[:0], rows.targets[:0])
    cases = [
        ({}, fake_task(tiny_task, rows, needs_data=True), "--data FILE"),
        ({"partition_by": "provider"}, fake_task(tiny_task, rows), "index, ward, found 'provider'"),
        ({"fleet": 2}, fake_task(tiny_task, rows), "at least 2 data holders"),
        ({}, fake_task(tiny_task, rows, rows), "add --fleet"),
        ({"fleet": 2}, fake_task(tiny_task, rows, empty), "'ward 8' to have rows"),
    ]
    for changes, task, expected in cases:
        with pytest.raises(CoterieError) as caught:
            read_dataset(settings(tmp_path, **changes), task)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)
