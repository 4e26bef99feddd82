"""What is attacked is what the client's own gate lets out."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation, nearest, observe
from coterie.attacks.threat_model import ThreatModel, threat_for
from coterie.client.training import train
from coterie.config import Granularity
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.mechanisms.layerwise import FixedNeighbourhood, LayerwiseLaplace, RelativeNeighbourhood
from coterie.rng import seeded
from coterie.tasks import ClientData, TrainingSettings

Rows = Callable[..., ClientData]
Model = Callable[[str], AuditedModel]


def trained(model: AuditedModel, data: ClientData, start: np.ndarray, steps: int) -> np.ndarray:
    settings = TrainingSettings(epochs=steps, step_size=1.0, batch_size=data.rows)
    order = seeded(5, "order", 1)
    return train(model.task, model.task.build(), start, model.layout, data, settings, rng=order)


@pytest.mark.parametrize("neighbourhood", list(Neighbourhood))
@pytest.mark.parametrize("steps", [1, 3])
def test_the_received_vector_is_the_mechanisms(
    model: Model, rows: Rows, neighbourhood: Neighbourhood, steps: int
) -> None:
    """Rebuilt from training and mechanism alone, with the same seeds: equal to the last bit."""
    audited, data = model("lenet"), rows(0, 2)
    start = audited.initial("default", rng=seeded(1))
    threat = threat_for(audited, 2.0, neighbourhood=neighbourhood, clipping_norm=0.3, batch_size=2, local_steps=steps)
    found = observe(audited, data, start, threat, seed=5)
    update = trained(audited, data, start, steps).astype(np.float64) - start
    kind = FixedNeighbourhood if neighbourhood is Neighbourhood.FIXED else RelativeNeighbourhood
    mechanism = LayerwiseLaplace(tuple(x.size for x in audited.layout.layers), 2.0, kind(threat.lengths))
    expected = start + mechanism.release(update, rng=seeded(5, "noise", 1)).update
    np.testing.assert_array_equal(found.received[0], expected.astype(np.float32))


def test_whole_vector_release_has_one_slice(model: Model) -> None:
    threat = threat_for(
        model("lenet"), 1.0, neighbourhood=Neighbourhood.FIXED, clipping_norm=1.0, granularity=Granularity.WHOLE
    )
    assert [layer.size for layer in threat.noised] == [model("lenet").layout.size]
    assert threat.lengths == pytest.approx((2.0,))  # four layers' balls of radius 1


def test_without_noise_the_trained_vector_is_taken(model: Model, rows: Rows) -> None:
    audited, data = model("lenet"), rows(0)
    start = audited.initial("dlg", rng=seeded(1))
    found = observe(audited, data, start, threat_for(audited, 0.0), seed=5)
    np.testing.assert_array_equal(found.received[0], trained(audited, data, start, 1))


def test_rounds_have_their_own_noise_and_are_averaged(
    model: Model, rows: Rows, see: Callable[..., tuple[Observation, ThreatModel]]
) -> None:
    audited = model("lenet")
    found, threat = see(audited, rows(0), 3.0, rounds=16)
    (evidence,) = found.evidence()
    assert evidence.rounds == 16
    truth, _ = see(audited, rows(0), 0.0)
    (exact,) = truth.evidence()
    for layer in threat.noised:
        own = slice(layer.start, layer.stop)
        noise = np.linalg.norm(evidence.update[own] - exact.update[own]) / np.linalg.norm(exact.update[own])
        assert noise == pytest.approx(3.0 / 4, rel=0.2)  # ν/√T


def test_moving_weights_are_kept_apart(
    model: Model, rows: Rows, see: Callable[..., tuple[Observation, ThreatModel]]
) -> None:
    found, _ = see(model("lenet"), rows(0), 1.0, rounds=3, moving=True)
    assert [one.rounds for one in found.evidence()] == [1, 1, 1]


def test_a_start_that_is_not_told_is_the_nearest_hypothesis(model: Model, rows: Rows) -> None:
    audited = model("lenet")
    hypotheses = np.stack([audited.initial("dlg", rng=seeded(i)) for i in range(3)])
    threat = threat_for(audited, 1.0)
    told = observe(audited, rows(0), hypotheses, threat, seed=1)
    hidden = observe(audited, rows(0), hypotheses, threat, seed=1, index_sent=False)
    assert hidden.chosen == (None,)
    assert told.chosen[0] == nearest(hypotheses, told.received[0])
    np.testing.assert_array_equal(hidden.starts, told.starts)


def test_bad_input_is_one_line(model: Model, rows: Rows) -> None:
    audited = model("lenet")
    start = audited.initial("dlg", rng=seeded(1))
    with pytest.raises(CoterieError, match=r"Expected a finite noise multiplier ν ≥ 0, found -1"):
        threat_for(audited, -1.0)
    with pytest.raises(CoterieError, match=r"found nan"):
        threat_for(audited, float("nan"))
    empty = ClientData("none", torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(CoterieError, match="found an empty set"):
        observe(audited, empty, start, threat_for(audited, 1.0), seed=0)
    other = ClientData("other", torch.zeros(1, 28, 28), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(CoterieError, match=r"Expected inputs of shape \(64,\)"):
        observe(audited, other, start, threat_for(audited, 1.0), seed=0)
    with pytest.raises(CoterieError, match="Expected 1 rows"):
        observe(audited, rows(0, 2), start, threat_for(audited, 1.0), seed=0)
    with pytest.raises(CoterieError, match=r"Expected hypotheses of shape"):
        observe(audited, rows(0), start[:-1], threat_for(audited, 1.0), seed=0)
