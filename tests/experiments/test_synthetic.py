"""The synthetic experiment on a few rounds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
from _simulations import Simulator, records

from coterie.config import Reseed
from coterie.mechanisms.events import Neighbourhood
from tests.experiments.conftest import marked


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    """The task, and the experiment's settings with 6 rounds."""
    monkeypatch.setattr("synthetic.MODES", {name: replace(run, rounds=6) for name, run in synthetic.MODES.items()})
    cases = {name: replace(run, rounds=6) for name, run in synthetic.FIGURE_CASES.items()}
    monkeypatch.setattr("synthetic.FIGURE_CASES", cases)
    return Simulator.of("synthetic", clients=synthetic.USERS)


def test_the_settings_are_the_papers() -> None:
    paper = synthetic.PAPER
    assert (paper.hypotheses, paper.clients_per_round, paper.epochs) == (2, 7, 1)
    assert (paper.noise_multiplier, paper.step_size, paper.batch_size) == (5.0, 0.1, 10)
    assert (paper.patience, paper.validate_every) == (6, 1)
    assert (paper.neighbourhood, paper.reseed) == (Neighbourhood.RELATIVE, Reseed.OFF)


def test_each_optimum_needs_a_hypothesis_of_its_own() -> None:
    swapped = np.array([[4.0, -4.5], [5.0, 6.5]], np.float32)
    assert synthetic.distances(swapped) == (0.5, 0.0)
    both_at_one = np.array([[5.0, 6.0], [5.0, 6.0]], np.float32)
    assert max(synthetic.distances(both_at_one)) == pytest.approx(np.hypot(1, 10.5))


def test_half_of_the_users_are_held_out_and_the_prices_are_the_papers(users: Simulator) -> None:
    found = synthetic.leakage(users, seeds=2)
    assert [len(own["cluster_1"]) for own in found] == [synthetic.LEAKAGE_ROUNDS] * 2
    assert all(np.all(np.diff(own[cluster]) >= 0) for own in found for cluster in ("cluster_1", "cluster_2"))
    fixed = replace(synthetic.PAPER, neighbourhood=Neighbourhood.FIXED)
    assert users.prices(fixed, 1)["pure"] == pytest.approx(0.4)
    assert users.prices(fixed, 6)["pure"] == pytest.approx(2.4)
    assert users.prices(replace(fixed, noise_multiplier=0.0), 6) == {}


def test_leakage_is_what_the_simulated_runs_have(users: Simulator) -> None:
    (result,) = users([replace(synthetic.PAPER, patience=0, rounds=40)])
    (own,) = synthetic.leakage(users, seeds=1)
    assert result.participations.max() == max(own["cluster_1"][39], own["cluster_2"][39])


def test_a_small_run_has_its_pictures_and_every_block(users: Simulator, tmp_path: Path) -> None:
    result = synthetic.measure(users, seeds=1)
    assert len(records(result["convergence"])) == 3 * 2 * len(synthetic.MULTIPLIERS)
    synthetic.draw(result, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"figure1.png", "figure2.png"}
    found = synthetic.blocks(result)
    assert found.keys() == marked("synthetic")
    assert "0 of 1 seeds" in found["verdict"]  # six rounds are too few for the start's distance
