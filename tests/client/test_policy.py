"""A policy: the radii that settings mean, and that a proposal can only add noise."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.client.policy import PrivacyPolicy, policy_for
from coterie.config import ClientSettings, Granularity
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.mechanisms.layerwise import FixedNeighbourhood, LayerwiseLaplace, RelativeNeighbourhood
from coterie.parameters import Entry, Layer, Layout
from coterie.protocol import PrivacyProposal, Refusal

FIXED, RELATIVE = Neighbourhood.FIXED, Neighbourhood.RELATIVE
LAYOUT = Layout(
    entries=(Entry("hidden.weight", (9,), 0, 9), Entry("out.weight", (4,), 9, 13)),
    layers=(Layer("hidden", 0, 9), Layer("out", 9, 13)),
)
NORMS = {"hidden": 3.0, "out": 4.0}


def policy(norms: float | Mapping[str, float] = NORMS, **changes: object) -> PrivacyPolicy:
    values = {"task": "t", "state": Path("s"), "noise_multiplier": 3.0, "budget": 10.0, **changes}
    return policy_for(ClientSettings.model_validate(values), LAYOUT, norms)


def test_the_tasks_norm_goes_to_every_layer_or_by_name() -> None:
    assert policy(2.0).radii == (2.0, 2.0)
    by_name = policy({"out": 4.0, "hidden": 3.0, "another": 9.0})
    assert (by_name.names, by_name.sizes, by_name.radii) == (("hidden", "out"), (9, 4), (3.0, 4.0))


def test_the_data_holders_norm_goes_before_the_tasks() -> None:
    assert policy(clipping_norm=0.5).radii == (0.5, 0.5)
    assert policy({}, clipping_norm=0.5).radii == (0.5, 0.5)


def test_a_layer_without_a_norm_is_named() -> None:
    with pytest.raises(CoterieError, match=r"clipping norm for layers \['out'\]"):
        policy({"hidden": 3.0})


def test_whole_takes_the_ball_around_the_layers_balls() -> None:
    whole = policy(granularity=Granularity.WHOLE)
    assert (whole.names, whole.sizes, whole.radii) == (("all",), (13,), (5.0,))  # √(3² + 4²)
    assert policy(granularity=Granularity.WHOLE, clipping_norm=0.5).radii == (0.5,)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_release_loss_is_n_over_nu_whatever_the_granularity(granularity: Granularity) -> None:
    assert policy(granularity=granularity).release_loss == pytest.approx(13 / 3, rel=1e-15)


def test_no_proposal_means_the_own_settings() -> None:
    assert policy().accept(PrivacyProposal()) == LayerwiseLaplace((9, 4), 3.0, FixedNeighbourhood((3.0, 4.0)))
    relative = policy(neighbourhood=RELATIVE, relative_floor=0.01).accept(PrivacyProposal())
    assert relative == LayerwiseLaplace((9, 4), 3.0, RelativeNeighbourhood((0.03, 0.04)))


@pytest.mark.parametrize(
    ("proposal", "reason"),
    [
        (PrivacyProposal(noise_multiplier=2.999), "noise multiplier 2.999 proposed, at least 3 accepted"),
        (PrivacyProposal(noise_multiplier=math.nextafter(3.0, 0)), "noise multiplier"),
        (PrivacyProposal(noise_multiplier=1e-300), "noise multiplier"),
        (PrivacyProposal(neighbourhood=RELATIVE), "relative neighbourhood proposed, only fixed accepted"),
        (PrivacyProposal(neighbourhood=RELATIVE, noise_multiplier=1000.0, clipping_norm=1000.0), "relative"),
        # Between the two layers' norms: more noise for one and less for the other is no bargain.
        (PrivacyProposal(clipping_norm=3.5), "clipping norm 3.5 proposed, at least 4 accepted"),
        (PrivacyProposal(clipping_norm=3.999, noise_multiplier=1000.0), "clipping norm"),
    ],
)
def test_a_weaker_proposal_is_refused_with_the_reason(proposal: PrivacyProposal, reason: str) -> None:
    refusal = policy().accept(proposal)
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason
    assert not refusal.exhausted


@pytest.mark.parametrize(
    ("proposal", "mechanism"),
    [
        (PrivacyProposal(noise_multiplier=3.0), LayerwiseLaplace((9, 4), 3.0, FixedNeighbourhood((3.0, 4.0)))),
        (PrivacyProposal(noise_multiplier=7.0), LayerwiseLaplace((9, 4), 7.0, FixedNeighbourhood((3.0, 4.0)))),
        (PrivacyProposal(clipping_norm=4.0), LayerwiseLaplace((9, 4), 3.0, FixedNeighbourhood((4.0, 4.0)))),
        (PrivacyProposal(neighbourhood=FIXED), LayerwiseLaplace((9, 4), 3.0, FixedNeighbourhood((3.0, 4.0)))),
        (PrivacyProposal(7.0, FIXED, 6.0), LayerwiseLaplace((9, 4), 7.0, FixedNeighbourhood((6.0, 6.0)))),
    ],
)
def test_a_stronger_proposal_is_taken(proposal: PrivacyProposal, mechanism: LayerwiseLaplace) -> None:
    assert policy().accept(proposal) == mechanism


def test_a_relative_policy_takes_fixed_which_is_stronger() -> None:
    relative = policy(neighbourhood=RELATIVE)
    accepted = relative.accept(PrivacyProposal(neighbourhood=FIXED))
    assert accepted == LayerwiseLaplace((9, 4), 3.0, FixedNeighbourhood((3.0, 4.0)))


positive = st.floats(min_value=1e-3, max_value=1e3)


@given(
    own=positive,
    norms=st.tuples(positive, positive),
    nu=st.none() | positive,
    norm=st.none() | positive,
    neighbourhood=st.sampled_from([None, FIXED, RELATIVE]),
    mode=st.sampled_from(list(Neighbourhood)),
    granularity=st.sampled_from(list(Granularity)),
)
def test_whatever_is_accepted_has_at_least_the_own_noise(
    own: float,
    norms: tuple[float, float],
    nu: float | None,
    norm: float | None,
    neighbourhood: Neighbourhood | None,
    mode: Neighbourhood,
    granularity: Granularity,
) -> None:
    held = policy(
        {"hidden": norms[0], "out": norms[1]}, noise_multiplier=own, neighbourhood=mode, granularity=granularity
    )
    accepted = held.accept(PrivacyProposal(nu, neighbourhood, norm))
    if isinstance(accepted, Refusal):
        return
    assert accepted.sizes == held.sizes
    assert accepted.noise_multiplier >= own
    assert accepted.planned_loss <= held.release_loss * (1 + 1e-12)
    if isinstance(accepted.neighbourhood, FixedNeighbourhood):
        # The mean noise norm of each layer is ν·C_l.
        assert all(taken >= least for taken, least in zip(accepted.neighbourhood.radii, held.radii, strict=True))
    else:
        assert mode is RELATIVE


@pytest.mark.parametrize("proposal", [PrivacyProposal(noise_multiplier=1e300), PrivacyProposal(clipping_norm=1e300)])
def test_an_absurd_proposal_is_refused_and_not_an_exception(proposal: PrivacyProposal) -> None:
    # The noise would leave float64: without a refusal the ledger has no row and the server no reason.
    assert isinstance(policy().accept(proposal), Refusal)
