"""The audit's grid, its resuming, its measuring: with an attack that is as good or as bad as a test wants."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.attacks import registry
from coterie.attacks.attack import Reconstruction
from coterie.attacks.audit import plan, run_audit
from coterie.attacks.cells import Cell, labels_found, measure_columns, run_cell
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.plan import AuditSettings, Condition, prepare
from coterie.attacks.results import most_identified
from coterie.attacks.threat_model import Knowledge, ThreatModel
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import price
from coterie.mechanisms.calibration import planned_release
from coterie.mechanisms.events import Neighbourhood


@dataclass(frozen=True)
class Quotient:
    """Of digits' one dense layer: row c of ∂W over entry c of ∂b is the image, for the class with the least bias."""

    name: str = "quotient"
    spoiled: bool = False  # returns noise instead
    needs: frozenset[Knowledge] = frozenset({Knowledge.CLASSES})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        update = -observation.evidence()[0].update
        weights, biases = update[:640].reshape(10, 64), update[640:]
        label = int(biases.argmin())
        image = rng.uniform(size=64) if self.spoiled else weights[label] / biases[label]
        return Reconstruction(torch.tensor(image)[None], torch.tensor([label]), None, 0.0, 1)


@dataclass(frozen=True)
class ByLikelihood:
    """The candidates by their gradients' distance to the observed update."""

    name: str = "likelihood"
    needs: frozenset[Knowledge] = frozenset({Knowledge.CANDIDATES})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        evidence = observation.evidence()[0]
        assert threat.candidates is not None
        start = torch.tensor(evidence.start, dtype=torch.float64)
        distances = []
        for inputs, targets in zip(threat.candidates.inputs, threat.candidates.targets, strict=True):
            weights = start[:640].view(10, 64).clone().requires_grad_()
            biases = start[640:].clone().requires_grad_()
            outputs = inputs.double() @ weights.T + biases
            loss = model.task.loss(outputs, targets).mean()
            found = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, [weights, biases])])
            distances.append(float(np.linalg.norm(-threat.step_size * found.numpy() - evidence.update)))
        return Reconstruction(None, None, np.array(distances), 0.0, len(distances))


@dataclass(frozen=True)
class Nearest:
    """Guesses the hypothesis that is nearest to what came back; fails if it is told which one it was."""

    name: str = "nearest"
    needs: frozenset[Knowledge] = frozenset({Knowledge.HYPOTHESES})

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        assert observation.chosen == (None,) * observation.rounds
        distances = np.linalg.norm(observation.hypotheses[0] - observation.received[0], axis=1)
        return Reconstruction(None, None, distances.astype(float), 0.0, 1)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time; test_report.py looks at them."""
    monkeypatch.setattr("coterie.attacks.audit.pictures_of", lambda *_: [])


Registered = Callable[..., None]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Registered:
    """``registered(attack, …)``: the only attacks that there are."""

    def register(*attacks: Any) -> None:
        named = {attack.name: attack for attack in attacks}
        monkeypatch.setattr(registry, "ATTACKS", named)
        monkeypatch.setattr("coterie.attacks.audit.ATTACKS", named)

    return register


SETTINGS = AuditSettings(task="digits", images=4, noise_multipliers=(0.01, 1000.0), layers=False)


def cell_of(results: dict[str, Any], attack: str, nu: float) -> dict[str, Any]:
    found: dict[str, Any] = next(
        cell for cell in results["cells"] if (cell["attack"], cell["noise_multiplier"]) == (attack, nu)
    )
    return found


def test_a_working_attack_makes_a_valid_audit_that_finds_a_leak(registered: Registered, tmp_path: Path) -> None:
    registered(Quotient())
    results = run_audit(SETTINGS, tmp_path)
    assert results["verdict"]["valid"] is True
    assert results["verdict"]["validity"].startswith("Control: without noise (ν = 0), quotient reconstructed")
    assert any(line.startswith("At ν = 0.01, in one round, quotient fully") for line in results["verdict"]["found"])
    (stopped,) = results["verdict"]["stopped"]
    assert stopped.startswith("ν = 1000 stopped quotient in one round")
    assert "at most 0 of 4, 95 % interval up to 49%" in stopped  # Wilson: z²/(4 + z²)
    assert cell_of(results, "quotient", 0.0)["rates"]["full"]["hits"] == 4
    assert cell_of(results, "quotient", 1000.0)["rates"]["full"]["hits"] == 0
    assert json.loads((tmp_path / "results.json").read_text()) == results


def test_the_control_is_run_though_nobody_asked(registered: Registered, tmp_path: Path) -> None:
    registered(Quotient())
    results = run_audit(replace(SETTINGS, noise_multipliers=(1.0,)), tmp_path)
    assert {cell["noise_multiplier"] for cell in results["cells"]} == {0.0, 1.0}


def test_an_attack_that_fails_without_noise_makes_the_audit_invalid(registered: Registered, tmp_path: Path) -> None:
    registered(Quotient(spoiled=True))
    results = run_audit(SETTINGS, tmp_path)
    assert results["verdict"]["valid"] is False
    assert results["verdict"]["validity"].startswith("This audit is invalid: without noise")
    assert "without noise it fails as well" in results["verdict"]["stopped"][0]


def test_nothing_is_ever_called_safe(registered: Registered, tmp_path: Path) -> None:
    registered(Quotient())
    run_audit(SETTINGS, tmp_path)
    for name in ("report.html", "results.json"):
        assert "safe" not in (tmp_path / name).read_text().replace("safetensors", "").lower()


def test_candidates_and_the_chosen_hypothesis_are_guessed(registered: Registered, tmp_path: Path) -> None:
    registered(ByLikelihood(), Nearest())
    results = run_audit(replace(SETTINGS, noise_multipliers=(0.1, 1e9)), tmp_path)
    assert results["candidates"] == 100
    assert cell_of(results, "likelihood", 0.1)["rates"]["identified"]["hits"] == 4
    assert cell_of(results, "likelihood", 1e9)["rates"]["identified"]["hits"] < 4
    assert cell_of(results, "nearest", 0.1)["rates"]["cluster"]["hits"] == 4
    assert results["verdict"]["valid"] is True  # both are right without noise


def test_the_true_candidate_is_at_no_fixed_place_and_of_the_same_class() -> None:
    material = prepare(replace(SETTINGS, images=8))
    places = set()
    for batch in range(8):
        rows, place = material.candidates(batch)
        places.add(place)
        own = material.batches[batch]
        assert torch.equal(rows.inputs[place], own.inputs)
        assert (rows.targets == own.targets).all()
        assert sum(torch.equal(row, own.inputs) for row in rows.inputs) == 1
    assert len(places) > 4


def test_an_audited_row_is_not_public() -> None:
    material = prepare(SETTINGS)
    assert material.public is not None
    assert len(material.pool) == 1797 - 4
    assert len(prepare(replace(SETTINGS, prior="none")).pool) == 1797 - 4
    assert prepare(replace(SETTINGS, prior="none")).public is None


def test_an_interrupted_audit_goes_on_with_the_same_figures(registered: Registered, tmp_path: Path) -> None:
    registered(Quotient(), ByLikelihood())

    class StopError(Exception):
        pass

    def after(count: int) -> Callable[[], None]:
        left = [count]

        def stop() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise StopError

        return stop

    with pytest.raises(StopError):
        run_audit(SETTINGS, tmp_path / "broken", on_cell=after(5))
    assert not (tmp_path / "broken" / "results.json").exists()
    told: list[tuple[int, int]] = []
    again = run_audit(SETTINGS, tmp_path / "broken", on_plan=lambda all_, found: told.append((all_, found)))
    assert told == [(24, 6)]  # two attacks, three ν, four rows; the sixth was kept before it was told
    whole = run_audit(SETTINGS, tmp_path / "whole")
    for results in (again, whole):
        for cell in results["cells"]:
            cell.pop("cpu_seconds")
    assert again == whole


def test_more_noise_multipliers_are_added_to_what_is_there(registered: Registered, tmp_path: Path) -> None:
    registered(Quotient())
    run_audit(SETTINGS, tmp_path)
    told: list[tuple[int, int]] = []
    more = replace(SETTINGS, noise_multipliers=(0.01, 1.0, 1000.0))
    run_audit(more, tmp_path, on_plan=lambda all_, found: told.append((all_, found)))
    assert told == [(16, 12)]


@pytest.mark.parametrize("change", [{"seed": 1}, {"images": 5}, {"step_size": 0.25}, {"init": "dlg"}])
def test_another_audits_folder_is_refused(registered: Registered, tmp_path: Path, change: dict[str, Any]) -> None:
    registered(Quotient())
    run_audit(SETTINGS, tmp_path)
    (name,) = change
    with pytest.raises(CoterieError, match=f"found another {name}.*give another --out"):
        run_audit(replace(SETTINGS, **change), tmp_path)


def test_another_effort_of_an_attack_is_refused(registered: Registered, tmp_path: Path) -> None:
    registered(Quotient())
    run_audit(SETTINGS, tmp_path)
    registered(Quotient(spoiled=True))
    with pytest.raises(CoterieError, match="found other settings"):
        run_audit(SETTINGS, tmp_path)


def test_a_damaged_cell_is_named(registered: Registered, tmp_path: Path) -> None:
    registered(Quotient())
    run_audit(SETTINGS, tmp_path)
    path = Cell("quotient", Condition(0.01, 1), 2).file(tmp_path)
    path.write_text("{")
    with pytest.raises(CoterieError, match=r"batch=2\.json.*remove it"):
        run_audit(SETTINGS, tmp_path)


def test_the_figures_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    settings = replace(SETTINGS, attacks=("label",), images=2)
    alone, together = (run_audit(settings, tmp_path / str(n), processes=n) for n in (1, 2))
    for results in (alone, together):
        for cell in results["cells"]:
            cell.pop("cpu_seconds")
    assert alone == together


def test_a_local_budget_becomes_the_noise_multiplier_that_has_this_price() -> None:
    material = prepare(
        replace(SETTINGS, noise_multipliers=(), local_epsilons=(2.0,), neighbourhood=Neighbourhood.FIXED)
    )
    control, condition = material.conditions()
    assert control.is_control
    sizes = [layer.size for layer in material.model.layout.layers]
    found = price([planned_release(sizes, condition.noise_multiplier)], delta=1e-5)
    assert found.local_pure == pytest.approx(2.0, rel=1e-12)


def test_the_guarantee_bounds_identification_by_bayes_rule() -> None:
    """Likelihoods within a factor e^ε of each other, a uniform prior over 100: at best e^ε : 1 for 99 others."""
    for epsilon in (0.0, 1.0, 4.0):
        assert most_identified(epsilon) == pytest.approx(np.exp(epsilon) / (np.exp(epsilon) + 99), rel=1e-12)
    assert most_identified(1e6) == 1.0


def test_more_rounds_are_less_noise(registered: Registered, tmp_path: Path) -> None:
    registered(Quotient())
    results = run_audit(replace(SETTINGS, noise_multipliers=(1.0,), rounds=(1, 25)), tmp_path)
    psnr = {cell["rounds"]: cell["medians"]["psnr"] for cell in results["cells"] if cell["noise_multiplier"] == 1}
    assert psnr[25] - psnr[1] == pytest.approx(14, abs=4)  # the noise falls by √25, the squared error by 25


def test_labels_are_counted_as_a_multiset() -> None:
    found, true = torch.tensor([3, 1, 3]), torch.tensor([1, 1, 3])
    assert labels_found(found, true) == [True, False, True]


def test_columns_are_measured_in_their_own_standard_deviations() -> None:
    own, others = np.array([1.0, 100.0]), np.array([[1.5, 100.0], [1.0, 150.0]])
    scales = np.array([1.0, 100.0])
    near = measure_columns(np.array([1.05, 105.0]), own, others, scales, bar=0.2)
    assert near["columns"] == pytest.approx([0.05, 0.05])
    assert (near["full"], near["recognisable"], near["identified"]) == (True, True, True)
    far = measure_columns(np.array([1.3, 100.0]), own, others, scales, bar=0.2)
    assert (far["full"], far["recognisable"], far["identified"]) == (False, False, False)
    middle = measure_columns(np.array([1.0, 120.0]), own, others, scales, bar=0.1)
    assert (middle["full"], middle["recognisable"], middle["identified"]) == (False, False, True)


def test_a_tie_identifies_nobody(registered: Registered) -> None:
    @dataclass(frozen=True)
    class Constant:
        name: str = "constant"
        needs: frozenset[Knowledge] = frozenset({Knowledge.CANDIDATES})

        def __call__(self, model: Any, observation: Any, threat: ThreatModel, *, rng: Any) -> Reconstruction:
            assert threat.candidates is not None
            return Reconstruction(None, None, np.zeros(len(threat.candidates)), 0.0, 0)

    registered(Constant())
    material = prepare(SETTINGS)
    record = run_cell(material, Cell("constant", Condition(1.0, 1), 0))
    assert record["rows"] == [{"identified": False}]


def test_an_attack_that_lacks_something_is_an_error_when_asked_for_and_a_note_when_not(registered: Registered) -> None:
    registered(Quotient(), Quotient(name="prior", needs=frozenset({Knowledge.PUBLIC_DATA})))
    without = replace(SETTINGS, prior="none")
    planned = plan(without)
    assert planned.attacks == ("quotient",)
    assert any(note.startswith("prior is left out: Expected public data") for note in planned.notes)
    with pytest.raises(CoterieError, match="Expected public data for attack 'prior'"):
        plan(replace(without, attacks=("quotient", "prior")))


def test_the_predictor_speaks_of_each_layer_and_of_the_prior_alone(registered: Registered, tmp_path: Path) -> None:
    registered(Quotient())
    results = run_audit(replace(SETTINGS, noise_multipliers=(1.0, 1e6), layers=True), tmp_path)
    psnr = {(row["layer"], row["noise_multiplier"]): row["psnr"] for row in results["layers"]}
    assert set(psnr) == {(layer, nu) for layer in ("linear", "all", "none") for nu in (1.0, 1e6)}
    assert psnr["all", 1.0] == psnr["linear", 1.0]  # there is one layer
    assert psnr["all", 1.0] > psnr["none", 1.0] + 3
