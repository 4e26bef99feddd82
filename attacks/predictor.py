"""How well any attack could do, without attacking: a linearised Bayesian bound on the pixels' error, layer by layer.

At the true row x with Jacobian J_l = ∂g_l/∂x of slice l's gradient the noise leaves the Fisher information

    I_l = J_lᵀJ_l/σ_l² + n_l·∇ln s_l·∇ln s_lᵀ,   σ_l = ν·s_l/√n_l,

where s_l is the noise's length scale: C_l (fixed; the second term vanishes, and J_l is that of the clipped gradient) or
‖g_l‖ (relative; the scale itself depends on the data). σ_l⁻² = ε_l²/n_l is the exact information per coordinate of
the density ∝ exp(−ε‖x‖) about its place, and n_l that about the logarithm of its scale (the radius is Gamma(n_l)).
With a Gaussian prior x ~ N(μ, Σ) from public rows the mean squared error of the best linear estimate is
tr((T·Σ_l I_l + Σ⁻¹)⁻¹)/d for T rounds from the same weights. It is a prediction, not a guarantee: the true model is
not linear and pixels are not Gaussian. It shows which layers leak.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coterie.attacks.matching import LinearCalls
from coterie.attacks.metrics import psnr
from coterie.attacks.models import AuditedModel
from coterie.attacks.priors import GaussianPrior
from coterie.attacks.threat_model import ThreatModel
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.parameters import as_tensors

_DIRECTIONS_AT_ONCE = 28


@dataclass(frozen=True)
class Sensitivity:
    """How one noised slice's gradient g depends on the d inputs: ``gram`` JᵀJ (d, d), ``along`` Jᵀg (d,), ‖g‖²."""

    name: str
    size: int
    gram: NDArray[np.float64]
    along: NDArray[np.float64]
    square: float


@dataclass(frozen=True)
class Prediction:
    """The predicted error: of all slices together, of each alone, and of the prior without any update (MSE)."""

    mse: float
    by_layer: Mapping[str, float]
    prior_mse: float

    @property
    def psnr(self) -> float:
        """The predicted PSNR in dB."""
        return psnr(self.mse)


def sensitivities(
    model: AuditedModel, start: NDArray[np.float32], inputs: Tensor, targets: Tensor, threat: ThreatModel
) -> tuple[Sensitivity, ...]:
    """The Jacobians' Gram matrices at one row ``inputs`` (1, …), by forward over reverse differentiation.

    A dense layer's weight gradient e·hᵀ is not formed: with De, Dh the derivatives of e and h in the d directions its
    Gram matrix is ‖h‖²·De·Deᵀ + ‖e‖²·Dh·Dhᵀ + u·vᵀ + v·uᵀ, u = De·e, v = Dh·h. Raises ``CoterieError`` for a batch,
    several local steps and a model with kinks.
    """
    if threat.batch_size > 1 or threat.local_steps > 1 or model.kinks:
        raise CoterieError("Expected one row, one local step and a smooth model for the predictor, found others")
    parameters = as_tensors(torch.from_numpy(start.astype(np.float64)), model.layout)
    row = inputs.double()
    factored = _single_dense_calls(model, parameters, row)
    whole = {name: value for name, value in parameters.items() if name not in factored}
    taps = {name: torch.zeros(1, parameters[name].shape[0], dtype=torch.float64) for name in factored}
    names = {id(parameters[name]): name for name in factored}

    def parts(x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        def loss(dense: dict[str, Tensor], added: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            with _Tapped(names, added) as tapped:
                outputs = functional_call(model.module, {**parameters, **dense}, (x,))
            return model.task.loss(outputs, targets).mean(), tapped.entered

        (gradients, errors), entered = grad(loss, argnums=(0, 1), has_aux=True)(whole, taps)
        return gradients, errors, entered

    gradients, errors, entered = parts(row)
    size = row.numel()
    chunks = []
    directions = torch.eye(size, dtype=torch.float64).view(size, *row.shape)
    for chunk in torch.split(directions, _DIRECTIONS_AT_ONCE):
        moved = vmap(lambda direction: jvp(parts, (row,), (direction,))[1])(chunk)
        chunks.append(tuple({k: v.detach().flatten(1) for k, v in part.items()} for part in moved))
    derivative = [{k: torch.cat([chunk[i][k] for chunk in chunks]) for k in chunks[0][i]} for i in range(3)]
    found = []
    for layer in threat.noised:
        gram = torch.zeros(size, size, dtype=torch.float64)
        along = torch.zeros(size, dtype=torch.float64)
        square = 0.0
        for entry in model.layout.entries:
            if not layer.start <= entry.start < layer.stop:
                continue
            if entry.name in factored:
                e, h = errors[entry.name].detach().reshape(-1), entered[entry.name].detach().reshape(-1)
                de, dh = derivative[1][entry.name], derivative[2][entry.name]
                u, v, ee, hh = de @ e, dh @ h, e @ e, h @ h
                gram += hh * de @ de.T + ee * dh @ dh.T + torch.outer(u, v) + torch.outer(v, u)
                along += hh * u + ee * v
                square += float(ee * hh)
            else:
                jacobian, value = derivative[0][entry.name], gradients[entry.name].detach().reshape(-1)
                gram += jacobian @ jacobian.T
                along += jacobian @ value
                square += float(value @ value)
        found.append(Sensitivity(layer.name, layer.size, gram.numpy(), along.numpy(), square))
    return tuple(found)


def predict(found: Sequence[Sensitivity], threat: ThreatModel, prior: GaussianPrior, *, rounds: int = 1) -> Prediction:
    """The predicted error from a row's sensitivities, at the threat's ν and neighbourhood, after ``rounds``."""
    precision = np.linalg.inv(prior.covariance().numpy())
    size = len(precision)
    infos = {}
    for one, length in zip(found, threat.lengths, strict=True):
        infos[one.name] = rounds * information(one, threat, length / (threat.step_size * threat.local_steps))
    total = sum(infos.values(), np.zeros((size, size)))

    def error(information_matrix: NDArray[np.float64]) -> float:
        return float(np.trace(np.linalg.inv(information_matrix + precision)) / size)

    return Prediction(error(total), {k: error(v) for k, v in infos.items()}, error(np.zeros((size, size))))


def information(one: Sensitivity, threat: ThreatModel, length: float) -> NDArray[np.float64]:
    """I_l (d, d) of one round; ``length`` is the slice's radius or floor in units of the gradient."""
    nu, norm = threat.noise_multiplier, one.square**0.5
    if nu == 0:
        raise CoterieError("Expected ν > 0 for the predictor, found 0: without noise the information is infinite")
    if threat.neighbourhood is Neighbourhood.RELATIVE:
        scale = max(norm, length)
        info = one.size / (nu * scale) ** 2 * one.gram
        if norm > length:
            slope = one.along / one.square
            info = info + one.size * np.outer(slope, slope)
        return np.asarray(info)
    gram = one.gram
    if norm > length:
        gram = (length / norm) ** 2 * (gram - np.outer(one.along, one.along) / one.square)
    return np.asarray(one.size / (nu * length) ** 2 * gram)


class _Tapped(TorchFunctionMode):
    """Adds a zero to the named dense layers' outputs, whose gradient is then e, and keeps their inputs h."""

    def __init__(self, names: Mapping[int, str], taps: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names, self.taps = names, taps
        self.entered: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        if func is functional.linear:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **named}
            if (name := self.names.get(id(given["weight"]))) is not None:
                self.entered[name] = given["input"]
                return result + self.taps[name]
        return result


def _single_dense_calls(model: AuditedModel, parameters: Mapping[str, Tensor], row: Tensor) -> frozenset[str]:
    """The weights that one run uses once, in a dense layer with one row of inputs."""
    with torch.no_grad(), LinearCalls() as linear:
        functional_call(model.module, dict(parameters), (row,))
    names = {id(value): name for name, value in parameters.items()}
    used = [(names.get(id(weight)), entered) for weight, entered, _ in linear.calls]
    return frozenset(
        name
        for name, entered in used
        if name is not None and entered.shape[:-1].numel() == 1 and sum(n == name for n, _ in used) == 1
    )
