"""Grids: their names, what is kept, what is not run again, and a disk that refuses."""

import io
import json
import math
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from coterie.errors import CoterieError
from coterie.simulation import SimulatedRun, points, sweep
from coterie.simulation.points import Record
from coterie.simulation.rows import Rows
from coterie.simulation.sweep import Sweep, check_folder, grid, run_sweep
from coterie.simulation.table import COLUMN_TYPES, as_parquet
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
        (["z=1"], "NAME one of k, nu, C, T, found 'z=1'$"),
        (["K=1"], "found 'K=1'; did you mean k\\?"),
        (["c=1"], "did you mean C\\?"),
        (["nv=1"], "did you mean nu\\?"),
        (["--noise-multiplier=1"], "did you mean nu\\?"),
        (["rounds=1"], "did you mean T\\?"),
        (["k="], "numbers such as k=1,3, found --sweep 'k='"),
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
    found: list[int] = []
    told: list[int] = []
    plan = Sweep(BASE, grid(sweeps), seeds, folder)
    records = run_sweep(task, Rows.of(clients), plan, on_found=found.append, on_rounds=told.append)
    assert len(found) == 1
    assert min(told, default=1) > 0
    assert sum(found + told) == sum(run.rounds for point in plan.points for run in plan.runs(point))
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


def test_what_is_found_finished_is_told_apart_from_what_is_done(brisk: Brisk, tmp_path: Path) -> None:
    task, clients = brisk
    swept(task, clients, tmp_path, "T=2")
    found: list[int] = []
    told: list[int] = []
    plan = Sweep(BASE, grid(["T=2,3"]), 2, tmp_path)
    run_sweep(task, Rows.of(clients), plan, on_found=found.append, on_rounds=told.append)
    assert found == [4]
    assert told == [2, 2, 2]  # of both seeds, round by round


def test_rounds_that_patience_saves_count_as_done(brisk: Brisk) -> None:
    task, clients = brisk
    told: list[int] = []
    plan = Sweep(SimulatedRun(rounds=500, clients_per_round=4, validate_every=1, patience=1), ({},), 1, None)
    (record,) = run_sweep(task, Rows.of(clients), plan, on_rounds=told.append)
    assert record["rounds"] < 500
    assert sum(told) == 500


def test_results_are_a_typed_table_with_its_settings_and_a_picture(brisk: Brisk, tmp_path: Path) -> None:
    task, clients = brisk
    records = swept(task, clients, tmp_path, "nu=0,3")
    assert {file.name for file in tmp_path.iterdir()} == {"points", "sweep.json", "results.parquet", "sweep.png"}
    table = parquet.read_table(tmp_path / "results.parquet")
    assert set(table.schema.names) <= set(COLUMN_TYPES)
    assert all(table.schema.field(name).type == COLUMN_TYPES[name] for name in table.schema.names)
    for row, record in zip(table.to_pylist(), records, strict=True):
        price = record["price"] or dict.fromkeys(
            ("releases", "pure", "tight", "local_pure", "local_tight", "delta", "formal", "notes")
        )
        assert row == {name: value for name, value in record.items() if name != "price"} | {
            f"price_{name}": value for name, value in price.items()
        }
    assert table["price_pure"].null_count == 2
    about = json.loads(table.schema.metadata[b"coterie"])
    assert about["task"] == "hospital"
    assert [one["point"] for one in about["points"]] == [{"nu": 0.0}, {"nu": 3.0}]
    assert [one["settings"]["noise_multiplier"] for one in about["points"]] == [0.0, 3.0]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_types_do_not_depend_on_what_is_missing_and_no_bound_is_infinite(brisk: Brisk) -> None:
    task, clients = brisk
    free, priced = swept(task, clients, None, "nu=0,3", seeds=1)
    nothing = {**free, "metric": None, "honest_metric": None}
    unbounded = {**priced, "price": {**priced["price"], "pure": None}}

    def table(*records: Record) -> pa.Table:
        return parquet.read_table(io.BytesIO(as_parquet(records, None)))

    assert table(nothing).schema == table(priced).schema
    assert table(nothing, unbounded)["price_pure"].to_pylist() == [None, math.inf]


def test_a_folder_of_other_settings_seeds_or_data_is_refused(brisk: Brisk, tmp_path: Path) -> None:
    task, clients = brisk
    swept(task, clients, tmp_path, "k=1")
    with pytest.raises(CoterieError, match="another seeds: give another --out"):
        swept(task, clients, tmp_path, "k=1", seeds=3)
    with pytest.raises(CoterieError, match="another task and data"):
        swept(task, hospital_rows([5] * 10), tmp_path, "k=1")
    other = replace(task, training=replace(task.training, step_size=0.5))
    with pytest.raises(CoterieError, match="another task and data"):
        swept(other, clients, tmp_path, "k=1")
    plan = Sweep(SimulatedRun(rounds=3, clients_per_round=4), grid(["k=1"]), 2, tmp_path)
    with pytest.raises(CoterieError, match="another rounds"):
        run_sweep(task, Rows.of(clients), plan)


@pytest.mark.parametrize(
    ("changes", "sweeps", "words"),
    [
        ({}, ["k=1,0"], "--hypotheses to be at least 1, found 0"),
        ({"clients_per_round": 9}, ["k=1"], "--clients-per-round to be at most 8, the clients that train of 10"),
        ({"clipping_norm": 1.0}, ["nu=0,1e-320"], "noise outside what floating point holds"),
    ],
)
def test_a_bad_point_is_found_before_anything_runs(
    brisk: Brisk, tmp_path: Path, simulated: list[int], changes: dict[str, float], sweeps: list[str], words: str
) -> None:
    task, clients = brisk
    plan = Sweep(replace(BASE, **changes), grid(sweeps), 2, tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(CoterieError, match=words):
        run_sweep(task, Rows.of(clients), plan)
    assert simulated == []
    assert not (tmp_path / "out").exists()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder, and a user who is not root: no folder is read-only for root."""
    tmp_path.chmod(0o500)
    if (before := os.geteuid()) == 0:
        os.seteuid(65534)
    yield tmp_path
    os.seteuid(before)
    tmp_path.chmod(0o700)


def test_a_read_only_folder_is_found_before_anything_runs(brisk: Brisk, read_only: Path, simulated: list[int]) -> None:
    task, clients = brisk
    for folder in (read_only, read_only / "new" / "out"):
        with pytest.raises(CoterieError, match=r"Expected to write to --out .*(;|:) give another --out"):
            swept(task, clients, folder, "k=1")
    assert simulated == []


def test_an_out_that_is_a_file_is_found_without_making_anything(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(CoterieError, match="--out to be a folder, found a file"):
            check_folder(path)
    check_folder(tmp_path / "new" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four pages, which some points fill."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs to mount a small file system: {error}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_truly_full_disk_is_one_line_and_keeps_finished_points(
    brisk: Brisk, small_disk: Path, simulated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, clients = brisk
    monkeypatch.setattr(sweep, "_RUNS_AT_ONCE", 2)
    sweeps = "nu=1,2,3,4,5,6"
    with pytest.raises(CoterieError, match="No space left on device") as caught:
        swept(task, clients, small_disk, sweeps)
    assert str(caught.value).endswith("finished grid points are kept: run the same command again to go on")
    assert "\n" not in str(caught.value)
    kept = sorted(file.name for file in (small_disk / "points").iterdir())
    assert 0 < len(kept) < 6
    assert kept == [f"nu={nu}.0.json" for nu in range(1, len(kept) + 1)]
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    simulated.clear()
    assert len(swept(task, clients, small_disk, sweeps)) == 12
    assert simulated == [2] * (6 - len(kept))


def test_a_full_disk_is_one_line_and_keeps_finished_points(
    brisk: Brisk, tmp_path: Path, simulated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, clients = brisk
    real, room = points.write_atomically, 2  # sweep.json and one point

    def filling(path: Path, content: bytes) -> None:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        room -= 1
        real(path, content)

    with monkeypatch.context() as full:
        full.setattr(points, "write_atomically", filling)
        with pytest.raises(CoterieError, match="No space left on device; finished grid points are kept") as caught:
            swept(task, clients, tmp_path, "k=1,2")
    assert "\n" not in str(caught.value)
    assert [file.name for file in (tmp_path / "points").iterdir()] == ["k=1.json"]
    simulated.clear()
    swept(task, clients, tmp_path, "k=1,2")
    assert simulated == [2]
    in_the_way = tmp_path / "a file"
    in_the_way.write_text("")
    with pytest.raises(CoterieError, match="--out to be a folder, found a file"):
        swept(task, clients, in_the_way, "k=1")
