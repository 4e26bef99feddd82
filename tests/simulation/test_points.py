"""A sweep's folder: whose it is, and files in it that are not what they should be."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coterie.errors import CoterieError
from coterie.simulation import SimulatedRun, points, simulate, sweep
from coterie.simulation.points import Record, fingerprint
from coterie.simulation.rows import Rows
from coterie.simulation.sweep import Sweep, grid, run_sweep
from coterie.tasks import ClientData, Task, seeded_module
from tests.simulation.conftest import hospital_rows

Brisk = tuple[Task, list[ClientData]]
BASE = SimulatedRun(rounds=2, clients_per_round=4, validate_every=1)


def swept(brisk: Brisk, folder: Path, *sweeps: str, base: SimulatedRun = BASE, seeds: int = 2) -> list[Record]:
    task, clients = brisk
    return run_sweep(task, Rows.of(clients), Sweep(base, grid(sweeps), seeds, folder))


def test_a_folder_of_another_sweep_is_refused_though_no_point_is_the_same(brisk: Brisk, tmp_path: Path) -> None:
    swept(brisk, tmp_path, "k=1")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.json")}
    for other, words in (
        ({"base": replace(BASE, validate_every=2)}, "another validate_every"),
        ({"base": replace(BASE, noise_multiplier=0.0)}, "another noise_multiplier"),
        ({"seeds": 3}, "another seeds"),
    ):
        with pytest.raises(CoterieError, match=f"sweep.json to be of this sweep, found {words}: give another --out"):
            swept(brisk, tmp_path, "k=2", **other)
    with pytest.raises(CoterieError, match="another swept names"):
        swept(brisk, tmp_path, "nu=3")
    task, _ = brisk
    with pytest.raises(CoterieError, match="another task and data"):
        swept((task, hospital_rows([5] * 10)), tmp_path, "k=2")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.json")} == before
    # What is swept has no value of its own in the settings that are compared.
    swept(brisk, tmp_path, "k=2", base=replace(BASE, hypotheses=7))
    (tmp_path / "sweep.json").unlink()
    with pytest.raises(CoterieError, match=r"found no sweep.json: give another --out$"):
        swept(brisk, tmp_path, "k=3")


def test_a_folder_without_a_finished_point_is_anyones(brisk: Brisk, tmp_path: Path) -> None:
    swept(brisk, tmp_path, "k=1")
    (tmp_path / "points" / "k=1.json").unlink()
    swept(brisk, tmp_path, "nu=0", seeds=1)
    assert json.loads((tmp_path / "sweep.json").read_text())["settings"]["swept names"] == ["nu"]


def test_the_order_of_options_does_not_name_the_points(
    brisk: Brisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = swept(brisk, tmp_path, "nu=0,3", "k=1,2")
    monkeypatch.delattr(sweep, "simulate")  # nothing is left to do
    again = swept(brisk, tmp_path, "k=1,2", "nu=0,3")
    assert [list(record)[:2] for record in again] == [["k", "nu"]] * 8
    assert sorted(again, key=lambda record: (record["nu"], record["k"], record["seed"])) == first
    assert {file.name for file in (tmp_path / "points").iterdir()} == {
        f"k={k},nu={nu}.json" for k in (1, 2) for nu in ("0.0", "3.0")
    }


def _without(record: Any, name: str) -> Any:
    return {own: value for own, value in record.items() if own != name}


HUGE = 10**400
CHANGES: dict[str, Callable[[Any], object]] = {
    "no object": lambda known: [known],
    "null settings": lambda known: {**known, "settings": None},
    "no records": lambda known: _without(known, "records"),
    "records of another kind": lambda known: {**known, "records": {"0": 1}},
    "too few records": lambda known: {**known, "records": known["records"][:1]},
    "a record of another kind": lambda known: {**known, "records": [3, 4]},
    "seeds in another order": lambda known: {**known, "records": known["records"][::-1]},
    **{
        f"{name} = {str(value)[:9]}": lambda known, name=name, value=value: {  # type: ignore[misc]
            **known,
            "records": [{**record, name: value} for record in known["records"]],
        }
        for name, value in (
            *(("k", 2), ("k", True), ("rounds", HUGE), ("rounds", 1.5), ("metric", "1"), ("metric", float("nan"))),
            *(("metric", HUGE), ("collapsed", 0), ("metric_name", None), ("clients_per_hypothesis", [None])),
            *(("price", {}), ("price", {"releases": 1}), ("new", 1)),
        )
    },
    "a missing field": lambda known: {**known, "records": [_without(record, "price") for record in known["records"]]},
    "a price without a field": lambda known: {
        **known,
        "records": [{**record, "price": _without(record["price"], "local_tight")} for record in known["records"]],
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one point, whose file the tests change."""
    return tmp_path_factory.mktemp("finished")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_file_is_one_line(brisk: Brisk, finished: Path, change: Callable[[Any], object]) -> None:
    file = finished / "points" / "k=1.json"
    file.unlink(missing_ok=True)
    swept(brisk, finished, "k=1")
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(CoterieError, match=r"k=1\.json.*(remove it|give another --out)") as caught:
        swept(brisk, finished, "k=1")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(file))


@pytest.mark.parametrize("text", ['{"settings": ', "", "\xff", "[" * 100_000, '{"settings": 1' + "0" * 5000 + "}"])
@pytest.mark.parametrize("name", ["points/k=1.json", "sweep.json"])
def test_a_file_that_is_no_json_is_one_line(brisk: Brisk, finished: Path, name: str, text: str) -> None:
    (finished / "points" / "k=1.json").unlink(missing_ok=True)
    swept(brisk, finished, "k=1")
    (finished / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(CoterieError, match=f"{name}.*(remove it|give another --out)$") as caught:
        swept(brisk, finished, "k=1")
    assert "\n" not in str(caught.value)


def wider() -> nn.Module:
    """The layers of ``narrow``, of other shapes."""
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


def narrow() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def bent() -> nn.Module:
    """The same parameters as ``narrow``, and another function of them."""
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), nn.Tanh())


def test_the_fingerprint_changes_with_whatever_changes_results(brisk: Brisk, monkeypatch: pytest.MonkeyPatch) -> None:
    task, clients = brisk
    rows = Rows.of(clients)

    def with_model(build: Callable[[], nn.Module]) -> Task:
        return replace(task, build=build, initialise=lambda rng: seeded_module(build, rng))

    loss, score = task.loss, task.score
    variants = [
        *(with_model(build) for build in (narrow, wider, bent)),
        replace(with_model(narrow), loss=lambda outputs, targets: 2 * loss(outputs, targets)),
        replace(with_model(narrow), score=lambda outputs, targets: 2 * score(outputs, targets)),
    ]
    found = [fingerprint(variant, rows) for variant in variants]
    assert found == [fingerprint(variant, rows) for variant in variants]
    elsewhere = replace(rows, targets=rows.targets + 1)
    monkeypatch.setattr(points, "version", lambda _: "0.0.0")
    assert len({*found, fingerprint(variants[0], rows), fingerprint(variants[0], elsewhere)}) == 7


WRONG: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "scalar": (lambda values: values.mean(), r"found shape \(\)"),
    "column": (lambda values: values[:, None], r"found shape \(16, 1\)"),
    "float": (lambda values: float(values.mean()), "found float"),
}


@pytest.mark.parametrize("name", ["loss", "score"])
@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG)
def test_a_loss_or_score_of_another_shape_is_one_line(
    brisk: Brisk, tmp_path: Path, name: str, wrong: Callable[[torch.Tensor], object], words: str
) -> None:
    task, clients = brisk
    right = getattr(task, name)
    own = replace(task, name="own:task", **{name: lambda outputs, targets: wrong(right(outputs, targets))})  # type: ignore[arg-type]
    expected = rf"Expected the {name} of task 'own:task' to be one value for each row, shape \(16,\) .*, {words}"
    with pytest.raises(CoterieError, match=expected):
        simulate(own, clients, [BASE])
    with pytest.raises(CoterieError, match=expected):
        swept((own, clients), tmp_path / "out")
    assert not (tmp_path / "out").exists()
