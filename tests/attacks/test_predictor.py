"""The predictor's derivatives against differences, its limits against closed forms; priors."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from coterie.attacks.matching import gradient
from coterie.attacks.models import AuditedModel
from coterie.attacks.predictor import Sensitivity, information, predict, sensitivities
from coterie.attacks.priors import fit_class, fit_gaussian, total_variation
from coterie.attacks.threat_model import Rows, threat_for
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.parameters import as_tensors
from coterie.rng import seeded
from coterie.tasks import ClientData

Model = Callable[[str], AuditedModel]
TakeRows = Callable[..., ClientData]


def test_sensitivities_are_the_derivatives(model: Model, rows: TakeRows) -> None:
    audited, data = model("lenet"), rows(0)
    threat = threat_for(audited, 1.0)
    start = audited.initial("dlg", rng=seeded(1))
    found = sensitivities(audited, start, data.inputs, data.targets, threat)
    vector = torch.from_numpy(start.astype(np.float64))
    parameters = {k: v.requires_grad_() for k, v in as_tensors(vector, audited.layout).items()}

    def flat(inputs: torch.Tensor) -> torch.Tensor:
        values = gradient(audited, parameters, inputs, data.targets, threat)
        return torch.cat([values[entry.name].detach().reshape(-1) for entry in audited.layout.entries])

    step, x = 1e-5, data.inputs.double()
    directions = torch.eye(64, dtype=torch.float64)
    jacobian = torch.stack([(flat(x + step * d) - flat(x - step * d)) / (2 * step) for d in directions])
    value = flat(x)
    for one, layer in zip(found, audited.layout.layers, strict=True):
        own = jacobian[:, layer.start : layer.stop]
        g = value[layer.start : layer.stop]
        scale = float((own @ own.T).abs().max())
        np.testing.assert_allclose(one.gram, (own @ own.T).numpy(), atol=1e-6 * scale)
        np.testing.assert_allclose(one.along, (own @ g).numpy(), rtol=1e-4, atol=1e-6 * float((own @ g).abs().max()))
        assert one.square == pytest.approx(float(g @ g), rel=1e-9)


def test_information_of_each_neighbourhood(model: Model) -> None:
    """By hand: two inputs, gradient g = (3, 4), Jacobian the identity."""
    one = Sensitivity("l", 2, np.eye(2), np.array([3.0, 4.0]), 25.0)
    relative = threat_for(model("twin"), 2.0)
    slope = np.array([3.0, 4.0]) / 25
    expected = 2 / (2 * 5.0) ** 2 * np.eye(2) + 2 * np.outer(slope, slope)
    np.testing.assert_allclose(information(one, relative, 1e-9), expected)
    fixed = threat_for(model("twin"), 2.0, neighbourhood=Neighbourhood.FIXED)
    np.testing.assert_allclose(information(one, fixed, 10.0), 2 / 20.0**2 * np.eye(2))
    # Clipped to radius 1: moving along g changes nothing any more.
    clipped = information(one, fixed, 1.0)
    np.testing.assert_allclose(clipped @ [3.0, 4.0], [0, 0], atol=1e-12)
    np.testing.assert_allclose(clipped @ [-4.0, 3.0], 2 / 4 / 25 * np.array([-4.0, 3.0]))
    with pytest.raises(CoterieError, match="Expected ν > 0"):
        information(one, threat_for(model("twin"), 0.0), 1.0)


def test_prediction_between_prior_and_perfection(model: Model, rows: TakeRows, public: Rows) -> None:
    audited, data, prior = model("lenet"), rows(0), fit_gaussian(public.inputs)
    found = sensitivities(
        audited, audited.initial("dlg", rng=seeded(1)), data.inputs, data.targets, threat_for(audited, 1.0)
    )
    errors = [predict(found, threat_for(audited, nu), prior).mse for nu in (1e-3, 0.1, 1.0, 10.0, 1e3)]
    assert errors == sorted(errors)
    assert errors[0] < 1e-5
    one = predict(found, threat_for(audited, 1.0), prior)
    assert errors[2] <= min(one.by_layer.values()) <= max(one.by_layer.values()) <= one.prior_mse
    assert predict(found, threat_for(audited, 1.0), prior, rounds=10).mse < one.mse
    # With fixed radii and ν → ∞ nothing is left but the prior.
    none = predict(found, threat_for(audited, 1e8, neighbourhood=Neighbourhood.FIXED), prior)
    assert none.mse == pytest.approx(none.prior_mse, rel=1e-6)


def test_the_predictor_refuses_batches(model: Model, rows: TakeRows) -> None:
    audited = model("lenet")
    with pytest.raises(CoterieError, match="Expected one row"):
        sensitivities(
            audited,
            audited.initial("dlg", rng=seeded(1)),
            rows(0, 2).inputs,
            rows(0, 2).targets,
            threat_for(audited, 1.0, batch_size=2),
        )


def test_a_gaussian_prior_is_the_rows_covariance() -> None:
    rng = seeded(3)
    inputs = torch.from_numpy(rng.standard_normal((400, 6)) @ rng.standard_normal((6, 6)))
    prior = fit_gaussian(inputs)
    exact = np.cov(inputs.numpy().T)
    values = np.linalg.eigvalsh(exact)
    np.testing.assert_allclose(np.linalg.eigvalsh(prior.covariance().numpy()), values, rtol=1e-9)
    np.testing.assert_allclose(prior.covariance().numpy(), exact, atol=1e-9 * values[-1])
    z = torch.from_numpy(rng.standard_normal((3, 6)))
    torch.testing.assert_close(prior.whitened(prior.inputs(z)), z)
    root = torch.stack([prior.inputs(e) - prior.mean for e in torch.eye(6, dtype=torch.float64)])
    torch.testing.assert_close(root @ root.T, prior.covariance())


def test_a_class_prior_is_of_its_class(public: Rows) -> None:
    prior = fit_class(public, 3)
    expected = public.inputs[public.targets == 3].double().mean(dim=0)
    torch.testing.assert_close(prior.mean, expected)
    few = Rows(public.inputs[:30], torch.arange(30))
    torch.testing.assert_close(fit_class(few, 0).mean, few.inputs.double().mean(dim=0))
    with pytest.raises(CoterieError, match="at least 2 public rows"):
        fit_gaussian(public.inputs[:1])


def test_total_variation_of_an_edge() -> None:
    image = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    image[..., 2:] = 1.0
    assert float(total_variation(image)) == pytest.approx(4.0, abs=0.03)  # √10⁻⁶ at each of 20 flat differences
