"""What a data holder accepts: its own privacy settings against what the server proposes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from coterie.config import ClientSettings, Granularity
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.mechanisms.layerwise import FixedNeighbourhood, LayerwiseLaplace, RelativeNeighbourhood
from coterie.parameters import Layout
from coterie.protocol import PrivacyProposal, Refusal

_ROUNDING = 1e-12


@dataclass(frozen=True)
class PrivacyPolicy:
    """The least privacy that this data holder accepts.

    ``radii`` holds the public clipping norm C_l of every noised vector (each layer, or the whole update), in the
    update's norm; ``sizes`` their dimensions n_l. ``relative_floor`` times C_l is the least scale of the noise in
    relative mode.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    radii: tuple[float, ...]
    layers_in_each: int  # 1, or all of them when the whole update is one vector
    noise_multiplier: float
    neighbourhood: Neighbourhood
    relative_floor: float

    def accept(self, proposal: PrivacyProposal) -> LayerwiseLaplace | Refusal:
        """The mechanism for a round, at least as private as this policy, or the reason to refuse the round.

        A larger noise multiplier ν, or a larger clipping norm at the same ν, is more noise: accepted. Fixed radii
        are d-private and relative ones are not, so a policy of fixed never accepts relative.
        """
        if (nu := proposal.noise_multiplier) is not None and nu < self.noise_multiplier:
            return Refusal(f"noise multiplier {nu:g} proposed, at least {self.noise_multiplier:g} accepted")
        if proposal.neighbourhood is Neighbourhood.RELATIVE and self.neighbourhood is Neighbourhood.FIXED:
            return Refusal("relative neighbourhood proposed, only fixed accepted")
        radii = self.radii
        if (norm := proposal.clipping_norm) is not None:
            # A norm C for every layer is a ball of radius C√L for L layers together.
            proposed, least = norm * math.sqrt(self.layers_in_each), max(self.radii)
            if proposed < least * (1 - _ROUNDING):
                return Refusal(f"clipping norm {proposed:g} proposed, at least {least:g} accepted")
            radii = (max(proposed, least),) * len(radii)
        nu = max(self.noise_multiplier, proposal.noise_multiplier or 0.0)
        neighbourhood: FixedNeighbourhood | RelativeNeighbourhood = FixedNeighbourhood(radii)
        if (proposal.neighbourhood or self.neighbourhood) is Neighbourhood.RELATIVE:
            neighbourhood = RelativeNeighbourhood(tuple(self.relative_floor * radius for radius in radii))
        try:
            return LayerwiseLaplace(self.sizes, nu, neighbourhood)
        except ValueError as error:
            return Refusal(f"noise outside what floating point holds proposed: {error}")

    @property
    def release_loss(self) -> float:
        """The pure privacy loss of one release at the recorded radii: Σ_l n_l/ν = n/ν (papers, Theorem 4.1)."""
        return math.fsum(size / self.noise_multiplier for size in self.sizes)


def policy_for(settings: ClientSettings, layout: Layout, proposed_norm: float | Mapping[str, float]) -> PrivacyPolicy:
    """The policy that a data holder's settings mean for a model; the task proposes the clipping norms.

    Raises ``CoterieError`` when the task proposes no norm for a layer.
    """
    names = tuple(layer.name for layer in layout.layers)
    sizes = tuple(layer.size for layer in layout.layers)
    if settings.clipping_norm is not None:
        radii = (settings.clipping_norm,) * len(sizes)
    elif isinstance(proposed_norm, Mapping):
        if missing := [name for name in names if name not in proposed_norm]:
            raise CoterieError(f"Expected the task to propose a clipping norm for layers {missing}, found none")
        radii = tuple(float(proposed_norm[name]) for name in names)
    else:
        radii = (float(proposed_norm),) * len(sizes)
    if settings.granularity is Granularity.WHOLE:
        # One ball that holds every update the per-layer balls would, unless the data holder names its radius.
        whole = settings.clipping_norm or math.sqrt(math.fsum(radius * radius for radius in radii))
        names, sizes, radii = ("all",), (layout.size,), (whole,)
    policy = PrivacyPolicy(
        names=names,
        sizes=sizes,
        radii=radii,
        layers_in_each=len(layout.layers) // len(sizes),
        noise_multiplier=settings.noise_multiplier,
        neighbourhood=settings.neighbourhood,
        relative_floor=settings.relative_floor,
    )
    if isinstance(problem := policy.accept(PrivacyProposal()), Refusal):
        raise CoterieError(f"Expected privacy settings that can be used, found: {problem.reason}")
    return policy
