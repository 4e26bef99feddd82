"""Labels, candidates, clusters, norms and first layers: attacks that optimise nothing."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import binom

from coterie.attacks.analytic import AnalyticFirstLayer
from coterie.attacks.candidates import CandidateIdentification, negative_log_likelihood
from coterie.attacks.cluster import ClusterIdentification
from coterie.attacks.labels import LabelInference
from coterie.attacks.metrics import image_score
from coterie.attacks.models import AuditedModel, audited_model
from coterie.attacks.norms import NormSideChannel
from coterie.attacks.observation import Observation, observe
from coterie.attacks.threat_model import Rows, ThreatModel, threat_for
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.mechanisms.l2_laplace import L2Laplace
from coterie.rng import seeded
from coterie.tasks import ClientData, load_task

Model = Callable[[str], AuditedModel]
TakeRows = Callable[..., ClientData]
See = Callable[..., tuple[Observation, ThreatModel]]
ALPHA = 1e-9


def same_class(digits: Rows, index: int, count: int = 100) -> Rows:
    """Candidates of one row each, all of one class, the true one first."""
    label = int(digits.targets[index])
    others = [j for j in range(len(digits)) if int(digits.targets[j]) == label and j != index][: count - 1]
    chosen = [index, *others]
    return Rows(digits.inputs[chosen][:, None], digits.targets[chosen][:, None])


def named_first(model: AuditedModel, digits: Rows, take: TakeRows, trials: int, **settings: object) -> int:
    """How often the true one of 100 candidates has strictly the best likelihood."""
    hits = 0
    for trial in range(trials):
        index = trial % 40
        threat = threat_for(model, **settings).knowing(candidates=same_class(digits, index))  # type: ignore[arg-type]
        start = model.initial("default", rng=seeded(index, "start"))
        seen = observe(model, take(index), start, threat, seed=trial)
        ranking = CandidateIdentification()(model, seen, threat, rng=seeded(0)).ranking
        assert ranking is not None
        hits += int((ranking <= ranking[0]).sum() == 1)
    return hits


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_identification_stays_within_what_the_guarantee_allows(
    model: Model, digits: Rows, rows: TakeRows, epsilon: float
) -> None:
    """Fixed radii, pure local loss 2n/ν = ε between any two data sets: at most e^ε/(e^ε + 99) of the trials."""
    audited, trials = model("twin"), 60
    nu = 2 * audited.layout.size / epsilon
    hits = named_first(audited, digits, rows, trials, noise_multiplier=nu, neighbourhood=Neighbourhood.FIXED)
    bound = np.exp(epsilon) / (np.exp(epsilon) + 99)
    assert hits <= binom.isf(ALPHA, trials, bound)


def test_identification_succeeds_where_the_noise_is_small(model: Model, digits: Rows, rows: TakeRows) -> None:
    """The same helper finds a leak: the bound above is not kept by a blind attack."""
    settings = {"noise_multiplier": 0.5, "neighbourhood": Neighbourhood.FIXED}
    assert named_first(model("twin"), digits, rows, 20, **settings) >= 19


@pytest.mark.parametrize("neighbourhood", list(Neighbourhood))
def test_candidates_are_scored_by_the_mechanisms_density(neighbourhood: Neighbourhood, model: Model) -> None:
    """Against ``L2Laplace.log_density``, slice by slice, up to the constant that all candidates share."""
    threat = threat_for(model("twin"), 3.0, neighbourhood=neighbourhood, clipping_norm=0.7)
    rng = seeded(4)
    observed = rng.standard_normal((2, model("twin").layout.size))
    scores, exact = [], []
    for length in (0.5, 2.0):
        candidate = rng.standard_normal(observed.shape[1])
        candidate *= length / np.linalg.norm(candidate)
        if neighbourhood is Neighbourhood.FIXED:
            centre, scale = candidate * min(1.0, 0.7 / length), 0.7
        else:
            centre, scale = candidate, length
        law = L2Laplace(candidate.size, candidate.size / (3.0 * scale))
        scores.append(negative_log_likelihood(observed, candidate, threat))
        exact.append(-sum(law.log_density(one, centre) for one in observed))
    assert scores[0] - scores[1] == pytest.approx(exact[0] - exact[1], rel=1e-9)


def right_labels(model: AuditedModel, take: TakeRows, see: See, nu: float, trials: int) -> int:
    hits = 0
    for i in range(trials):
        found = LabelInference()(model, *see(model, take(i), nu, seed=i, init="default"), rng=seeded(i))
        assert found.targets is not None
        hits += int(found.targets[0] == take(i).targets[0])
    return hits


def test_labels_show_through_noise(model: Model, rows: TakeRows, see: See) -> None:
    assert right_labels(model("lenet"), rows, see, 3.0, 40) >= 38
    # The control: noise of 10,000 times the update leaves chance, one in ten.
    assert right_labels(model("lenet"), rows, see, 1e4, 40) <= binom.isf(ALPHA, 40, 0.1)


@pytest.mark.parametrize("count", [1, 4])
def test_labels_are_counted_after_clipping(model: Model, rows: TakeRows, see: See, count: int) -> None:
    for i in range(4):
        data = rows(i, count)
        seen = see(model("lenet"), data, 1e-3, neighbourhood=Neighbourhood.FIXED, clipping_norm=1e-2)
        found = LabelInference()(model("lenet"), *seen, rng=seeded(i))
        assert found.targets is not None
        assert sorted(found.targets.tolist()) == sorted(data.targets.tolist())


@pytest.mark.parametrize("count", [4, 8])
def test_the_labels_of_a_batch_are_counted(model: Model, rows: TakeRows, see: See, count: int) -> None:
    for i in range(4):
        data = rows(i, count)
        found = LabelInference()(model("lenet"), *see(model("lenet"), data, 0.0, init="default"), rng=seeded(i))
        assert found.targets is not None
        assert sorted(found.targets.tolist()) == sorted(data.targets.tolist())


def test_the_cluster_shows_unless_hypotheses_are_near(model: Model, rows: TakeRows) -> None:
    audited = model("lenet")
    far = np.stack([audited.initial("dlg", rng=seeded(i)) for i in range(4)])
    near = far[:1] + 1e-6 * (far - far[:1])
    hits = {"far": 0, "near": 0}
    for i in range(12):
        for name, hypotheses in (("far", far), ("near", near)):
            threat = threat_for(audited, 10.0)
            told = observe(audited, rows(i), hypotheses, threat, seed=i)
            hidden = observe(audited, rows(i), hypotheses, threat, seed=i, index_sent=False)
            ranking = ClusterIdentification()(audited, hidden, threat, rng=seeded(0)).ranking
            assert ranking is not None
            hits[name] += int(np.argmin(ranking) == told.chosen[0])
    assert hits["far"] == 12
    assert hits["near"] < 12
    alone = observe(audited, rows(0), far[0], threat_for(audited, 1.0), seed=0)
    with pytest.raises(CoterieError, match="Expected hypotheses for attack 'cluster'"):
        ClusterIdentification()(audited, alone, threat_for(audited, 1.0), rng=seeded(0))


def test_norms_tell_candidates_apart_at_any_relative_noise(model: Model, digits: Rows, rows: TakeRows) -> None:
    """Ten candidates at ν = 1,000, five rounds: norms alone name the right one far more often than one time in ten."""
    audited, hits = model("lenet"), 0
    for i in range(30):
        threat = threat_for(audited, 1000.0).knowing(candidates=same_class(digits, i, 10))
        start = audited.initial("dlg", rng=seeded(i))
        seen = observe(audited, rows(i), start, threat, seed=i, rounds=5)
        ranking = NormSideChannel()(audited, seen, threat, rng=seeded(0)).ranking
        assert ranking is not None
        hits += int(np.argmin(ranking) == 0)
    assert hits > binom.isf(ALPHA, 30, 0.1)
    fixed = threat_for(audited, 1.0, neighbourhood=Neighbourhood.FIXED).knowing(candidates=same_class(digits, 0, 10))
    with pytest.raises(CoterieError, match="Expected relative noise"):
        NormSideChannel()(audited, seen, fixed, rng=seeded(0))


def test_a_dense_first_layer_shows_its_inputs(model: Model, rows: TakeRows, see: See) -> None:
    audited = model("twin")
    assert audited.dense_first_layer == "linear"
    exact = AnalyticFirstLayer()(audited, *see(audited, rows(0), 0.0, init="default"), rng=seeded(0))
    assert exact.inputs is not None
    truth = rows(0).inputs.double().numpy().reshape(8, 8)
    assert image_score(exact.inputs.numpy().reshape(8, 8), truth).psnr >= 60
    noisy = AnalyticFirstLayer()(audited, *see(audited, rows(0), 1.0, init="default"), rng=seeded(0))
    assert noisy.inputs is not None
    assert image_score(noisy.inputs.numpy().reshape(8, 8), truth).correlation > 0.85
    assert model("lenet").dense_first_layer is None
    with pytest.raises(CoterieError, match="Expected dense first layer for attack 'analytic'"):
        AnalyticFirstLayer()(model("lenet"), *see(model("lenet"), rows(0), 0.0), rng=seeded(0))


def test_a_table_is_read_column_by_column() -> None:
    """One hospital's row: three inputs and the payment, from eleven parameters with ReLUs."""
    task = load_task("hospital")
    row = ClientData("x", torch.tensor([[1.0, -0.4, 0.3]]), torch.tensor([[1.7]]))
    audited = audited_model(task, row, "task")
    assert (audited.kinks, audited.classes) == (("relu at 'hidden' (Linear)",), None)
    start = audited.initial("default", rng=seeded(1))
    for nu, error in ((0.0, 1e-3), (0.01, 0.2)):
        threat = threat_for(audited, nu)
        found = AnalyticFirstLayer()(audited, observe(audited, row, start, threat, seed=1), threat, rng=seeded(0))
        assert found.inputs is not None
        assert found.targets is not None
        assert float((found.inputs - row.inputs).abs().max()) < error
        assert float((found.targets - row.targets).abs().max()) < error


def test_a_tables_row_is_identified(model: Model) -> None:
    task = load_task("hospital")
    rng = seeded(2)
    inputs = torch.tensor(rng.uniform(-1, 1, (50, 1, 3)), dtype=torch.float32)
    targets = torch.tensor(rng.uniform(0.4, 1.6, (50, 1, 1)), dtype=torch.float32)
    row = ClientData("x", inputs[0], targets[0])
    audited = audited_model(task, row, "task")
    hits = 0
    for trial in range(20):
        threat = threat_for(audited, 0.02).knowing(candidates=Rows(inputs, targets))
        start = audited.initial("default", rng=seeded(trial))
        seen = observe(audited, row, start, threat, seed=trial)
        ranking = CandidateIdentification()(audited, seen, threat, rng=seeded(0)).ranking
        assert ranking is not None
        hits += int(np.argmin(ranking) == 0)
    assert hits > binom.isf(ALPHA, 20, 1 / 50)
