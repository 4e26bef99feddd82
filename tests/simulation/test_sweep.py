"""Grids: their names, what is kept, what is not run again, and a disk that refuses."""

import csv
import json
from pathlib import Path

import pytest

from coterie.errors import CoterieError
from coterie.simulation import SimulatedRun, sweep
from coterie.simulation.rows import Rows
from coterie.simulation.sweep import Record, Sweep, grid, run_sweep
from coterie.tasks import ClientData, Task
from tests.simulation.conftest import hospital_rows

Brisk = tuple[Task, list[ClientData]]
BASE = SimulatedRun(rounds=2, clients_per_round=4, validate_every=1)


def test_a_grid_is_every_combination_in_order() -> None:
    assert grid([]) == ({},)
    assert grid(["k=1,3,1", "nu=0,0.5"]) == (
        {"k": 1, "nu": 0.0},
        {"k": 1, "nu": 0.5},
        {"k": 3, "nu": 0.0},
        {"k": 3, "nu": 0.5},
    )


@pytest.mark.parametrize(
    ("sweeps", "words"),
    [
        (["z=1"], "NAME one of k, nu, C, T, found 'z=1'"),
        (["k"], "numbers such as k=1,3, found --sweep 'k'"),
        (["k=1.5"], "numbers such as k=1,3"),
        (["nu=1,"], "numbers such as nu=1,3"),
        (["k=1", "k=2"], "found 'k' twice"),
    ],
)
def test_bad_sweeps_are_one_line(sweeps: list[str], words: str) -> None:
    with pytest.raises(CoterieError, match=words):
        grid(sweeps)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each simulation had: those that came from a file had none."""
    calls: list[int] = []
    real = sweep.simulate

    def counting(task: Task, rows: Rows, runs: list[SimulatedRun], **rest: object) -> object:
        calls.append(len(runs))
        return real(task, rows, runs, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep, "simulate", counting)
    return calls


def swept(task: Task, clients: list[ClientData], folder: Path | None, *sweeps: str, seeds: int = 2) -> list[Record]:
    told: list[int] = []
    plan = Sweep(BASE, grid(sweeps), seeds, folder)
    records = run_sweep(task, Rows.of(clients), plan, advance=told.append)
    assert sum(told) == sum(run.rounds for point in plan.points for run in plan.runs(point))
    return records


def test_finished_points_are_not_run_again_and_more_can_be_added(
    brisk: Brisk, tmp_path: Path, simulated: list[int]
) -> None:
    task, clients = brisk
    alone = swept(task, clients, None, "k=1,2", "nu=0,3")
    assert simulated == [4, 4]  # two values of ν and two seeds share a stack; two values of k do not
    simulated.clear()
    first = swept(task, clients, tmp_path / "new" / "out", "k=1", "nu=0,3")
    assert simulated == [4]
    simulated.clear()
    second = swept(task, clients, tmp_path / "new" / "out", "k=1,2", "nu=0,3")
    assert simulated == [4]
    assert [(r["k"], r["nu"], r["seed"]) for r in second] == [
        (k, nu, seed) for k in (1, 2) for nu in (0.0, 3.0) for seed in (0, 1)
    ]
    assert second[:4] == first
    assert [r["metric"] for r in second] == pytest.approx([r["metric"] for r in alone], rel=1e-5)
    simulated.clear()
    assert swept(task, clients, tmp_path / "new" / "out", "k=1,2", "nu=0,3") == second
    assert simulated == []


def test_many_runs_are_cut_in_stacks_and_a_point_is_kept_when_its_last_seed_is_done(
    brisk: Brisk, tmp_path: Path, simulated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, clients = brisk
    whole = swept(task, clients, None, "nu=3,0", seeds=3)
    monkeypatch.setattr(sweep, "_RUNS_AT_ONCE", 4)
    assert simulated == [6]
    cut = swept(task, clients, tmp_path, "nu=3,0", seeds=3)
    assert simulated == [6, 4, 2]
    assert [r["seed"] for r in cut] == [0, 1, 2, 0, 1, 2]
    assert [r["metric"] for r in cut] == pytest.approx([r["metric"] for r in whole], rel=1e-5)
    # 4 clients of 11 parameters a round: no stack of more than one run fits in 50 numbers.
    monkeypatch.setattr(sweep, "_NUMBERS_AT_ONCE", 50)
    simulated.clear()
    swept(task, clients, None, "nu=3", seeds=3)
    assert simulated == [1, 1, 1]


def test_results_are_written_as_csv_json_and_a_picture(brisk: Brisk, tmp_path: Path) -> None:
    task, clients = brisk
    records = swept(task, clients, tmp_path, "nu=0,3")
    assert json.loads((tmp_path / "results.json").read_text()) == records
    with (tmp_path / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["metric"]) for row in table] == [record["metric"] for record in records]
    assert [row["price_pure"] for row in table[:2]] == ["", ""]
    assert [float(row["price_pure"]) for row in table[2:]] == [record["price"]["pure"] for record in records[2:]]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_of_other_settings_seeds_or_data_is_refused(brisk: Brisk, tmp_path: Path) -> None:
    task, clients = brisk
    swept(task, clients, tmp_path, "k=1")
    with pytest.raises(CoterieError, match="another seeds: give another --out"):
        swept(task, clients, tmp_path, "k=1", seeds=3)
    with pytest.raises(CoterieError, match="another data"):
        swept(task, hospital_rows([5] * 10), tmp_path, "k=1")
    plan = Sweep(SimulatedRun(rounds=3, clients_per_round=4), grid(["k=1"]), 2, tmp_path)
    with pytest.raises(CoterieError, match="another rounds"):
        run_sweep(task, Rows.of(clients), plan)
    (tmp_path / "points" / "k=1.json").write_text('{"settings": ')
    with pytest.raises(CoterieError, match="finished grid point"):
        swept(task, clients, tmp_path, "k=1")


def test_a_bad_point_is_found_before_anything_runs(brisk: Brisk, tmp_path: Path, simulated: list[int]) -> None:
    task, clients = brisk
    with pytest.raises(CoterieError, match="--hypotheses to be at least 1, found 0"):
        swept(task, clients, tmp_path / "out", "k=1,0")
    assert simulated == []
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_keeps_finished_points(
    brisk: Brisk, tmp_path: Path, simulated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, clients = brisk
    real, room = sweep.write_atomically, 1

    def filling(path: Path, content: bytes) -> None:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        room -= 1
        real(path, content)

    with monkeypatch.context() as full:
        full.setattr(sweep, "write_atomically", filling)
        with pytest.raises(CoterieError, match="No space left on device; finished grid points are kept") as caught:
            swept(task, clients, tmp_path, "k=1,2")
    assert "\n" not in str(caught.value)
    assert [file.name for file in (tmp_path / "points").iterdir()] == ["k=1.json"]
    simulated.clear()
    swept(task, clients, tmp_path, "k=1,2")
    assert simulated == [2]
    in_the_way = tmp_path / "a file"
    in_the_way.write_text("")
    with pytest.raises(CoterieError, match="Expected to write to --out"):
        swept(task, clients, in_the_way, "k=1")
