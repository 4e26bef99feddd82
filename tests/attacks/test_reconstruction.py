"""What the attacks reach, on 8×8 digits with a LeNet: small versions of the full audit's facts."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.attacks.attack import Attack, Reconstruction, check_applies
from coterie.attacks.box import BoxConstrained
from coterie.attacks.cosine import CosineSimilarity
from coterie.attacks.dlg import DLG, IDLG
from coterie.attacks.metrics import assign, correlation, image_score
from coterie.attacks.models import AuditedModel, audited_model
from coterie.attacks.observation import Observation
from coterie.attacks.posterior import MaximumPosterior, Prior
from coterie.attacks.registry import ATTACKS, attack_named
from coterie.attacks.threat_model import ThreatModel
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.rng import seeded
from coterie.tasks import ClientData, load_task

Model = Callable[[str], AuditedModel]
Rows = Callable[..., ClientData]
See = Callable[..., tuple[Observation, ThreatModel]]


def run(attack: Attack, model: AuditedModel, seen: tuple[Observation, ThreatModel], **known: object) -> Reconstruction:
    observation, threat = seen
    return attack(model, observation, threat.knowing(**known), rng=seeded(9))


def quality(found: Reconstruction, data: ClientData) -> list[float]:
    """PSNR of each row in dB, in the best assignment."""
    assert found.inputs is not None
    images = found.inputs.numpy().reshape(data.rows, 8, 8)
    truth = data.inputs.double().numpy().reshape(data.rows, 8, 8)
    images = images[assign(images, truth)]
    return [image_score(a, b).psnr for a, b in zip(images, truth, strict=True)]


@pytest.mark.parametrize("init", ["default", "dlg"])
def test_without_noise_the_box_attack_converges(model: Model, rows: Rows, see: See, init: str) -> None:
    for i in range(2):
        data = rows(i)
        found = run(BoxConstrained(), model("lenet"), see(model("lenet"), data, 0.0, init=init, seed=i))
        assert min(quality(found, data)) >= 30, i
        assert found.targets is not None
        assert found.targets.tolist() == data.targets.tolist()


def test_a_zeroed_update_shows_nothing(model: Model, rows: Rows, see: See) -> None:
    """The negative control: the same attacks on a client that sent its start back."""
    observation, threat = see(model("lenet"), rows(0), 0.0)
    nothing = replace(observation, received=observation.starts.copy())
    quick = {"iterations": 100, "restarts": 1}
    for attack in (BoxConstrained(**quick), MaximumPosterior(Prior.VARIATION, **quick)):
        found = run(attack, model("lenet"), (nothing, threat))
        assert found.inputs is not None
        assert max(quality(found, rows(0))) < 20
        assert abs(correlation(found.inputs.numpy().reshape(8, 8), rows(0).inputs.numpy().reshape(8, 8))) < 0.9


def test_someone_elses_update_shows_someone_else(model: Model, rows: Rows, see: See) -> None:
    found = run(BoxConstrained(), model("lenet"), see(model("lenet"), rows(1), 0.0))
    assert min(quality(found, rows(1))) >= 30
    assert max(quality(found, rows(0))) < 20


def test_published_attacks_converge_without_noise(model: Model, rows: Rows, see: See) -> None:
    """DLG from the literature's weights; the batch's order of magnitude is what is tested, not every image."""
    best = {attack.name: 0.0 for attack in (DLG(), IDLG())}
    for i in range(2):
        seen = see(model("lenet"), rows(i), 0.0, seed=i)
        for attack in (DLG(iterations=60), IDLG()):
            best[attack.name] = max(best[attack.name], *quality(run(attack, model("lenet"), seen), rows(i)))
    assert min(best.values()) >= 30, best


def test_cosine_attack_beats_a_guess_without_noise(model: Model, rows: Rows, see: See) -> None:
    found = run(CosineSimilarity(iterations=300), model("lenet"), see(model("lenet"), rows(0), 0.0))
    assert found.inputs is not None
    image, truth = found.inputs.numpy().reshape(8, 8), rows(0).inputs.double().numpy().reshape(8, 8)
    assert correlation(image, truth) > 0.9


def test_little_noise_hides_nothing(model: Model, rows: Rows, see: See) -> None:
    found = run(MaximumPosterior(Prior.VARIATION, restarts=1), model("lenet"), see(model("lenet"), rows(0), 1e-3))
    assert min(quality(found, rows(0))) >= 30


def test_at_one_the_posterior_recognises_where_dlg_does_not(model: Model, rows: Rows, see: See) -> None:
    """The paper's conclusion that ν ≥ 1 is safe holds for the weakest attacker only."""
    published, strong = [], []
    for i in range(3):
        seen = see(model("lenet"), rows(i), 1.0, seed=i)
        published += quality(run(DLG(iterations=40), model("lenet"), seen), rows(i))
        strong += quality(run(MaximumPosterior(Prior.CLASS), model("lenet"), seen), rows(i))
    assert np.median(published) < 10
    assert np.median(strong) > 16
    assert min(np.array(strong) - published) > 3


def test_repeated_rounds_average_the_noise_away(model: Model, rows: Rows, see: See) -> None:
    attack = MaximumPosterior(Prior.CLASS, restarts=1)
    same = {
        t: quality(run(attack, model("lenet"), see(model("lenet"), rows(0), 1.0, rounds=t)), rows(0))[0]
        for t in (1, 16)
    }
    assert same[16] > same[1] + 4
    moving = run(attack, model("lenet"), see(model("lenet"), rows(0), 1.0, rounds=3, moving=True))
    assert quality(moving, rows(0))[0] > same[1] + 2


@pytest.mark.parametrize(("count", "steps"), [(2, 1), (4, 1), (8, 1), (1, 3), (2, 3)])
def test_batches_and_local_steps(model: Model, rows: Rows, see: See, count: int, steps: int) -> None:
    data = rows(0, count)
    seen = see(model("lenet"), data, 1e-2, local_steps=steps, step_size=0.1)
    found = run(MaximumPosterior(Prior.CLASS, iterations=150, restarts=1), model("lenet"), seen, targets=data.targets)
    assert np.median(quality(found, data)) > 20


def test_the_unrolled_steps_matter(model: Model, rows: Rows, see: See) -> None:
    """Reading three steps as one gradient is worse than unrolling them."""
    observation, threat = see(model("lenet"), rows(0), 0.0, local_steps=3, step_size=0.2)
    attack = BoxConstrained(restarts=1, iterations=200)
    unrolled = quality(run(attack, model("lenet"), (observation, threat)), rows(0))[0]
    mistaken = quality(run(attack, model("lenet"), (observation, threat), local_steps=1, step_size=0.6), rows(0))[0]
    assert unrolled >= 30
    assert unrolled > mistaken + 3


def test_fixed_radii_are_matched_after_clipping(model: Model, rows: Rows, see: See) -> None:
    """A radius far below the update's norm scales it; at ν near 0 the image is found all the same."""
    seen = see(model("lenet"), rows(0), 1e-4, neighbourhood=Neighbourhood.FIXED, clipping_norm=1e-2)
    found = run(MaximumPosterior(Prior.CLASS, iterations=100), model("lenet"), seen)
    assert quality(found, rows(0))[0] >= 25


def test_equal_arguments_give_equal_results(model: Model, rows: Rows, see: See) -> None:
    seen = see(model("lenet"), rows(0), 1.0)
    first, second = (run(MaximumPosterior(Prior.PRINCIPAL), model("lenet"), seen) for _ in range(2))
    assert first.inputs is not None
    assert second.inputs is not None
    assert torch.equal(first.inputs, second.inputs)


def test_a_model_with_kinks_is_refused_and_its_twin_offered(rows: Rows, see: See) -> None:
    sample = ClientData("x", torch.rand(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64))
    rectified = audited_model(load_task("femnist"), sample, "task")
    seen = see(rectified, sample, 1.0, init="default")
    with pytest.raises(CoterieError, match=r"found relu at 'convolution1' \(Conv2d\): attack its smooth twin"):
        check_applies(attack_named("box"), rectified, *seen)
    check_applies(attack_named("label"), rectified, *seen)


def test_attacks_by_name() -> None:
    expected = [
        "dlg",
        "idlg",
        "box",
        "cosine",
        "map-tv",
        "map-pca",
        "map-class",
        "analytic",
        "label",
        "candidates",
        "cluster",
        "norm",
    ]
    assert sorted(ATTACKS) == sorted(expected)
    assert all(attack_named(name).name == name for name in expected)
    with pytest.raises(CoterieError, match=r"did you mean 'idlg'\?"):
        attack_named("idgl")
