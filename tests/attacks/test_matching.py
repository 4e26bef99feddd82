"""The forward model is the client's training, and its shortcuts are exact."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.attacks.matching import Target, clipped, gradient, moments, squared_distances, targets_of
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.threat_model import ThreatModel
from coterie.mechanisms.events import Neighbourhood
from coterie.tasks import ClientData

Model = Callable[[str], AuditedModel]
Rows = Callable[..., ClientData]
See = Callable[..., tuple[Observation, ThreatModel]]


def prepared(model: AuditedModel, seen: tuple[Observation, ThreatModel]) -> Target:
    (target,) = targets_of(model, *seen)
    return target


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (3, 1), (2, 3)])
def test_the_true_rows_explain_what_was_sent(model: Model, rows: Rows, see: See, count: int, steps: int) -> None:
    audited, data = model("lenet"), rows(0, count)
    seen = see(audited, data, 0.0, local_steps=steps, step_size=0.3)
    target = prepared(audited, seen)
    found = gradient(audited, target.parameters, data.inputs.double(), data.targets, seen[1])
    for name, value in found.items():
        scale = float(target.observed[name].norm())
        assert float((value.detach() - target.observed[name]).norm()) < 1e-5 * max(scale, 1e-2), name


@pytest.mark.parametrize("count", [1, 3])
def test_factored_moments_are_the_formed_ones(model: Model, rows: Rows, see: See, count: int) -> None:
    audited, data = model("lenet"), rows(0, count)
    seen = see(audited, data, 1.0)
    target = prepared(audited, seen)
    assert target.factored == {"output.weight"}
    plain = replace(target, factored=frozenset())
    values = []
    for one in (target, plain):
        inputs = (0.5 * data.inputs.double() + 0.1).requires_grad_()
        found = moments(audited, one, inputs, data.targets, seen[1])
        (slope,) = torch.autograd.grad((found.squares + 3 * found.products).sum(), inputs)
        values.append((found.squares.detach(), found.products.detach(), slope))
    for fast, slow in zip(*values, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-12)


def test_distances_are_of_the_clipped_gradient(model: Model, rows: Rows, see: See) -> None:
    audited, data = model("lenet"), rows(0)
    seen = see(audited, data, 1.0, neighbourhood=Neighbourhood.FIXED, clipping_norm=0.5)
    target = prepared(audited, seen)
    found = moments(audited, target, data.inputs.double(), data.targets, seen[1])
    dense = gradient(audited, target.parameters, data.inputs.double(), data.targets, seen[1])
    for index, layer in enumerate(audited.layout.layers):
        flat = torch.cat([v.reshape(-1) for k, v in dense.items() if k.startswith(f"{layer.name}.")])
        observed = torch.cat([v.reshape(-1) for k, v in target.observed.items() if k.startswith(f"{layer.name}.")])
        expected = (flat * min(1.0, 0.5 / float(flat.norm())) - observed).square().sum()
        torch.testing.assert_close(squared_distances(found, target)[index], expected)
    assert bool((clipped(found, target).squares.sqrt() <= 0.5 * (1 + 1e-12)).all())


@pytest.mark.parametrize("neighbourhood", list(Neighbourhood))
def test_the_noises_variance_is_known(model: Model, rows: Rows, see: See, neighbourhood: Neighbourhood) -> None:
    """At the true rows Σ residual²/σ² is about n_l in every slice: the sum of n_l squares, ±6/√n_l·√2."""
    audited, data = model("lenet"), rows(0)
    for rounds in (1, 4):
        seen = see(audited, data, 2.0, neighbourhood=neighbourhood, clipping_norm=0.5, rounds=rounds)
        target = prepared(audited, seen)
        found = moments(audited, target, data.inputs.double(), data.targets, seen[1])
        ratio = (squared_distances(found, target) / target.variance / target.sizes).detach().numpy()
        tolerance = 12 / np.sqrt(target.sizes.numpy())
        assert (np.abs(ratio - 1) < tolerance).all(), ratio
