"""The strongest reconstructions: the likelihood of the noise, which the protocol names, and a prior on the inputs."""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
import torch
from torch import Tensor

from coterie.attacks.attack import Reconstruction, check_applies
from coterie.attacks.labels import labels_for
from coterie.attacks.matching import Target, moments, squared_distances, targets_of
from coterie.attacks.models import AuditedModel
from coterie.attacks.observation import Observation
from coterie.attacks.optimisation import Objective, bounded_lbfgs
from coterie.attacks.priors import GaussianPrior, fit_class, fit_gaussian, total_variation
from coterie.attacks.shapes import image_shape
from coterie.attacks.starts import feature_start, random_start
from coterie.attacks.threat_model import Knowledge, ThreatModel


class Prior(StrEnum):
    """What is believed of the inputs beforehand."""

    VARIATION = "tv"  # neighbouring pixels are alike: −ln p = w·TV(x), in the pixels' box
    PRINCIPAL = "pca"  # a Gaussian fitted to all public rows
    CLASS = "class"  # a Gaussian fitted to the public rows of the row's own class


_NEEDS = {
    Prior.VARIATION: frozenset({Knowledge.IMAGE, Knowledge.BOUNDED}),
    Prior.PRINCIPAL: frozenset({Knowledge.PUBLIC_DATA}),
    Prior.CLASS: frozenset({Knowledge.PUBLIC_DATA}),
}


@dataclass(frozen=True)
class MaximumPosterior:
    """min over x of Σ_l ‖clip(g_l) − o_l‖²/(2σ_l²) − ln p(x), with the noise's variance σ_l² of each slice.

    The n-dimensional L2 Laplace noise has its mass in a thin shell, and a Gaussian of the same variance has the same
    gradient there, up to 1/√n_l. The slices' weights n_l/(ν²‖δ_l‖²) (relative) or n_l/(ν²C_l²) (fixed) are what makes
    this stronger than plain matching, and the prior decides where the noise is large. Rounds from equal weights are
    averaged, those from moving weights add their likelihoods; several local steps are unrolled.

    ``variation_weight`` is w in nats per unit of total variation.
    """

    prior: Prior
    iterations: int = 400
    restarts: int = 2
    variation_weight: float = 3.0

    @property
    def name(self) -> str:
        """``map-tv``, ``map-pca`` or ``map-class``."""
        return f"map-{self.prior}"

    @property
    def needs(self) -> frozenset[Knowledge]:
        """A smooth classifier, and what the prior is made from."""
        return frozenset({Knowledge.SMOOTH_MODEL, Knowledge.CLASSES}) | _NEEDS[self.prior]

    def __call__(
        self, model: AuditedModel, observation: Observation, threat: ThreatModel, *, rng: np.random.Generator
    ) -> Reconstruction:
        """Attack."""
        check_applies(self, model, observation, threat)
        targets = targets_of(model, observation, threat)
        labels = labels_for(model, targets, threat, rng=rng)
        likelihood = partial(negative_log_likelihood, model, targets, labels, threat)
        if self.prior is Prior.VARIATION:
            return self._in_the_box(model, targets, labels, threat, likelihood, rng)
        return self._whitened(model, targets, labels, threat, likelihood, rng)

    def _in_the_box(
        self,
        model: AuditedModel,
        targets: tuple[Target, ...],
        labels: Tensor,
        threat: ThreatModel,
        likelihood: Objective,
        rng: np.random.Generator,
    ) -> Reconstruction:
        shape = image_shape(threat.input_shape) or (1, 1, 1)

        def objective(variables: Tensor) -> Tensor:
            return likelihood(variables) + self.variation_weight * total_variation(variables.view(-1, *shape))

        start = random_start(threat, rng=rng)
        shown = feature_start(model, targets, threat, start, self.iterations)
        starts = [start] if shown is None else [shown.point.numpy()]
        starts += [random_start(threat, rng=rng) for _ in range(self.restarts - 1)]
        found = [bounded_lbfgs(objective, s, threat.input_range, self.iterations) for s in starts]
        best = min(found, key=lambda minimum: minimum.value)
        return Reconstruction(
            best.point.view(threat.batch_size, *threat.input_shape),
            labels,
            None,
            best.value,
            sum(minimum.evaluations for minimum in found) + (shown.evaluations if shown else 0),
        )

    def _whitened(
        self,
        model: AuditedModel,
        targets: tuple[Target, ...],
        labels: Tensor,
        threat: ThreatModel,
        likelihood: Objective,
        rng: np.random.Generator,
    ) -> Reconstruction:
        priors = self._priors(labels, threat)
        size = int(np.prod(threat.input_shape))

        def inputs(z: Tensor) -> Tensor:
            return torch.stack([prior.inputs(row) for prior, row in zip(priors, z.view(-1, size), strict=True)])

        def objective(z: Tensor) -> Tensor:
            return likelihood(inputs(z).reshape(-1)) + 0.5 * z.square().sum()

        shown = feature_start(model, targets, threat, random_start(threat, rng=rng), self.iterations)
        # Rows of a batch must start apart; one row may start at the prior's mean.
        starts = [(0.3 if len(priors) > 1 else 0.0) * rng.standard_normal(len(priors) * size)]
        if shown is not None:
            starts.append(priors[0].whitened(shown.point).numpy())
        starts += [0.3 * rng.standard_normal(len(priors) * size) for _ in range(self.restarts - len(starts))]
        found = [bounded_lbfgs(objective, start, None, self.iterations) for start in starts[: self.restarts]]
        best = min(found, key=lambda minimum: minimum.value)
        return Reconstruction(
            inputs(best.point).view(threat.batch_size, *threat.input_shape),
            labels,
            None,
            best.value,
            sum(minimum.evaluations for minimum in found) + (shown.evaluations if shown else 0),
        )

    def _priors(self, labels: Tensor, threat: ThreatModel) -> list[GaussianPrior]:
        assert threat.public is not None
        if self.prior is Prior.PRINCIPAL:
            return [fit_gaussian(threat.public.inputs)] * threat.batch_size
        of_class = {label: fit_class(threat.public, label) for label in set(labels.tolist())}
        return [of_class[label] for label in labels.tolist()]


def negative_log_likelihood(
    model: AuditedModel, targets: tuple[Target, ...], labels: Tensor, threat: ThreatModel, variables: Tensor
) -> Tensor:
    """Σ over evidence and slices of ‖clip(g_l) − o_l‖²/(2σ_l²) at flat inputs ``variables``, in nats."""
    inputs = variables.view(threat.batch_size, *threat.input_shape)
    total = torch.zeros((), dtype=torch.float64)
    for target in targets:
        distances = squared_distances(moments(model, target, inputs, labels, threat), target)
        total = total + (distances / (2 * target.variance)).sum()
    return total
