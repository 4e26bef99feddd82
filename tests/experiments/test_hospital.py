"""The hospital experiments on a few rounds of small data: hospital, utility and personalization."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hospital
import numpy as np
import personalization
import pytest
import utility
from _simulations import Simulator, columns, records

from coterie.mechanisms.events import Neighbourhood
from coterie.simulation.rows import Rows
from coterie.tasks import load_task
from tests.experiments.conftest import LEVELS, marked

FOUND = {"heuristic": 1.0, "releases": 1}


@pytest.fixture
def simulator(hospitals: Rows, monkeypatch: pytest.MonkeyPatch) -> Simulator:
    """The task on 40 made-up hospitals, and the experiments' settings with 4 rounds of 8 clients."""
    base = replace(hospital.BASE, rounds=4, clients_per_round=8, validate_every=2)
    monkeypatch.setattr("hospital.BASE", base)
    monkeypatch.setattr("hospital.HYPOTHESES", (1, 3))
    monkeypatch.setattr("hospital.AIM", {3: hospital.AIM[3]})
    for module in ("hospital", "utility"):
        monkeypatch.setattr(f"{module}.MULTIPLIERS", (0.0, 3.0, 5.0))
    monkeypatch.setattr("personalization.HYPOTHESES", (1, 3))
    monkeypatch.setattr("utility.HOSPITAL", replace(base, hypotheses=5))
    monkeypatch.setattr("utility.ROUNDS", (2, 3, 4))
    monkeypatch.setattr("utility.SYNTHETIC", replace(utility.SYNTHETIC, rounds=2))
    return Simulator(load_task("hospital"), hospitals)


def test_a_small_grid_has_its_pictures_and_every_block(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hospital.CENTRAL_ROUNDS", 2)
    result = hospital.measure(simulator, seeds=1)
    found = records(result["grid"])
    with_noise = len(hospital.MULTIPLIERS) - 1
    assert len(found) == 2 * len(hospital.HYPOTHESES) * (2 * with_noise + 1)
    hospital.draw(result, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"figure3.png", "figure4.png", "figure4_honest.png"}
    assert hospital.blocks(result).keys() == marked("hospital")


def test_runs_without_noise_stand_in_both_neighbourhoods() -> None:
    own = {"neighbourhood": "none", "reseed": "on", "k": 3, "nu": 0.0}
    assert hospital.cell([own], "relative", "on", 3, 0.0) == hospital.cell([own], "fixed", "on", 3, 0.0) == [own]
    assert hospital.cell([own], "fixed", "off", 3, 0.0) == []


def test_every_release_is_in_the_leakage(simulator: Simulator) -> None:
    (own,) = hospital.leakage(simulator, seeds=1)
    counts = own["clients_by_releases"]
    assert sum(counts) == 28  # 70 % of 40 train
    assert np.dot(counts, range(len(counts))) == 4 * 8


def test_the_central_fit_finds_two_price_levels(simulator: Simulator) -> None:
    one, two = (hospital.central_fit(simulator, k, seed=0) for k in (1, 2))
    assert one == pytest.approx((LEVELS[1] - LEVELS[0]) / 2 * 10_000, rel=0.1)  # one model predicts the middle
    assert two < 0.2 * one


def test_the_central_fit_weighs_clients_equally() -> None:
    weights = hospital._weights(np.array([0, 0, 2]), np.array([1, 4, 2]), 3)
    assert weights.tolist() == pytest.approx(
        np.array([[0.5, 0.125, 0.125, 0.125, 0.125, 0, 0], [0] * 7, [0, 0, 0, 0, 0, 0.5, 0.5]])
    )


def test_prices_are_those_of_the_accountant(simulator: Simulator) -> None:
    prices = simulator.prices(replace(hospital.BASE, neighbourhood=Neighbourhood.FIXED, noise_multiplier=3.0), 6)
    assert prices["pure"] == pytest.approx(6 * 11 / 3)
    assert prices["tight"] < prices["pure"] < prices["local_tight"] * 2
    assert prices["formal"]


def test_one_process_or_two_give_the_same(simulator: Simulator) -> None:
    runs = [replace(hospital.BASE, hypotheses=k, seed=seed) for k in (1, 2) for seed in range(2)]
    alone, shared = simulator(runs), replace(simulator, processes=2)(runs)
    assert [result.run for result in shared] == runs
    assert [result.metric for result in alone] == [result.metric for result in shared]


def test_a_small_utility_run_has_its_pictures_and_every_block(simulator: Simulator, tmp_path: Path) -> None:
    result = utility.measure(simulator, Simulator.of("synthetic", clients=200), seeds=1)
    relative = [record for record in records(result["hospital"]) if record["neighbourhood"] == "relative"]
    assert relative
    assert all(record["tight"] is None for record in relative)
    utility.draw(result, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"hospital.png", "synthetic.png"}
    assert utility.blocks(result).keys() == marked("utility")


def _cost(nu: float, metrics: Sequence[float], tight: Sequence[float]) -> list[dict[str, Any]]:
    own = {"neighbourhood": "fixed", "k": 5, "rounds": 150, "nu": nu, **FOUND}
    return [{**own, "metric": m, "tight": t, "local_tight": 2 * t} for m, t in zip(metrics, tight, strict=True)]


def test_a_cost_is_the_median_error_at_the_largest_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utility.MULTIPLIERS", (0.0, 3.0))
    (point,) = utility.curve(_cost(3.0, (700, 900, 710), (8.0, 9.0, 10.0)), "metric")
    assert (point["median"], point["low"], point["high"], point["tight"]) == (710, 700, 900, 10.0)


def test_a_level_takes_the_best_that_costs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utility.MULTIPLIERS", (0.0, 3.0, 10.0))
    monkeypatch.setattr("utility.ROUNDS", (150,))
    found = _cost(3.0, (700,), (20.0,)) + _cost(10.0, (800,), (6.0,))
    rows = {row.split("|")[1].strip(): row for row in utility._levels(found).splitlines()[2:]}
    assert "700 (ν = 3" in rows["≤ 30"].split("|")[2]
    assert "800 (ν = 10" in rows["≤ 10"].split("|")[2]
    assert "none" in rows["≤ 10"].split("|")[3]


def test_a_small_personalization_has_its_picture_and_every_block(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("personalization.EPOCHS", (1, 2))
    result = personalization.measure(simulator, seeds=1)
    personalization.draw(result, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"hospital.png"}
    assert personalization.blocks(result).keys() == marked("personalization")


def test_a_hospital_alone_predicts_its_own_level(simulator: Simulator) -> None:
    # Rows are LEVEL + N(0, 0.02²): the mean of one or two of them is off by about √(1 + 1/m)·200 dollars.
    assert 150 < personalization.alone(simulator, seed=0) < 350


def test_records_and_columns_are_inverse() -> None:
    found = [{"a": 1, "b": [2]}, {"a": 3, "b": []}]
    assert records(columns(found)) == found


def test_columns_need_the_same_names() -> None:
    with pytest.raises(KeyError):
        columns([{"a": 1}, {"b": 2}])
