"""Prices of ledgers: exact sums, the contract that every price keeps, and what may not be claimed."""

import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.mechanisms import accounting
from coterie.mechanisms.accounting import Accountant, Price, price, pure_loss
from coterie.mechanisms.events import (
    GaussianRelease,
    Neighbourhood,
    Noise,
    ReleaseEvent,
    SelectionRelease,
    UpdateRelease,
)
from coterie.mechanisms.privacy_loss import GaussianLoss, L2LaplaceLoss, ResponseLoss


def update(
    dimension: int, multiplier: float, radius: float = 1.0, mode: Neighbourhood = Neighbourhood.FIXED
) -> UpdateRelease:
    return UpdateRelease(mode, (Noise(dimension, dimension / (multiplier * radius), radius),))


def layered(*sizes: int, multiplier: float) -> UpdateRelease:
    return UpdateRelease(
        Neighbourhood.FIXED,
        tuple(Noise(size, size / (multiplier * radius), radius) for radius, size in enumerate(sizes, start=1)),
    )


PRICES: dict[str, Callable[[Price], float]] = {
    "pure": lambda found: found.pure,
    "tight": lambda found: found.tight,
    "local_pure": lambda found: found.local_pure,
    "local_tight": lambda found: found.local_tight,
}
LEDGERS: dict[str, Sequence[ReleaseEvent]] = {
    "updates": [update(11, 5.0)] * 6,
    "layers": [layered(8, 3, multiplier=3.0)] * 4,
    "unequal": [update(11, 5.0), update(100, 20.0, radius=0.3), update(2, 5.0, radius=7.0), update(1, 4.0)],
    "selections": [update(11, 5.0), SelectionRelease("randomized-argmin", 3, 0.5)] * 5,
    "gaussians": [GaussianRelease(11, 4.0, 1.0)] * 5,
    "mixed": [update(11, 5.0), GaussianRelease(11, 4.0, 1.0), SelectionRelease("exponential", 3, 0.5)],
    "relative": [update(11, 5.0, mode=Neighbourhood.RELATIVE), update(11, 5.0, radius=0.1)],
}


@pytest.fixture(params=LEDGERS)
def ledger(request: pytest.FixtureRequest) -> Sequence[ReleaseEvent]:
    return LEDGERS[request.param]


@pytest.fixture(params=PRICES)
def read(request: pytest.FixtureRequest) -> Callable[[Price], float]:
    return PRICES[request.param]


class TestContractOfEveryPrice:
    def test_nothing_costs_nothing(self, read: Callable[[Price], float]) -> None:
        assert read(price([], delta=1e-5)) == 0

    def test_one_more_release_never_costs_less(
        self, ledger: Sequence[ReleaseEvent], read: Callable[[Price], float]
    ) -> None:
        costs = [read(price(ledger[:count], delta=1e-5)) for count in range(len(ledger) + 1)]
        for before, after in itertools.pairwise(costs):
            assert after >= before * (1 - 1e-3)  # prices are rounded up, by at most so much
        assert costs[-1] > costs[0]

    def test_a_smaller_delta_never_costs_less(
        self, ledger: Sequence[ReleaseEvent], read: Callable[[Price], float]
    ) -> None:
        costs = [read(price(ledger, delta=delta)) for delta in (0.5, 1e-2, 1e-5, 1e-9, 1e-14)]
        assert costs == sorted(costs)

    def test_order_does_not_matter(self, ledger: Sequence[ReleaseEvent], read: Callable[[Price], float]) -> None:
        assert read(price(ledger, delta=1e-5)) == read(price(list(reversed(ledger)), delta=1e-5))

    def test_a_live_ledger_agrees_with_one_priced_at_once(
        self, ledger: Sequence[ReleaseEvent], read: Callable[[Price], float]
    ) -> None:
        accountant = Accountant()
        for event in ledger:
            accountant.add([event])
            accountant.price(delta=1e-5)
        assert read(accountant.price(delta=1e-5)) == read(price(ledger, delta=1e-5))

    def test_any_two_values_cost_no_less_than_near_ones(
        self, ledger: Sequence[ReleaseEvent], read: Callable[[Price], float]
    ) -> None:
        found = price(ledger, delta=1e-5)
        assert found.local_pure >= found.pure
        assert found.local_tight >= found.tight

    def test_a_delta_is_never_paid_for_nothing(self, ledger: Sequence[ReleaseEvent]) -> None:
        for delta in (0.5, 1e-5, 1e-14):
            found = price(ledger, delta=delta)
            assert found.tight <= found.pure
            assert found.local_tight <= found.local_pure


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    multiplier=st.floats(0.5, 200),
    rounds=st.integers(1, 60),
    delta=st.floats(1e-9, 0.1),
)
def test_tight_is_at_most_pure_for_any_plan(sizes: list[int], multiplier: float, rounds: int, delta: float) -> None:
    found = price([layered(*sizes, multiplier=multiplier)] * rounds, delta=delta)
    assert 0 <= found.tight <= found.pure
    assert found.tight <= found.local_tight <= found.local_pure
    assert found.pure == pytest.approx(rounds * sum(sizes) / multiplier, rel=1e-12)


def test_pure_loss_is_the_exact_sum() -> None:
    assert pure_loss([update(11, 3.0)] * 20) == pytest.approx(20 * 11 / 3, rel=1e-15)
    assert pure_loss([layered(8, 3, multiplier=3.0)] * 20) == pytest.approx(20 * 11 / 3, rel=4e-16)
    many = [update(1, 10.0, radius=0.1)] * 20_000
    assert pure_loss(many) == math.fsum([many[0].layers[0].epsilon * 0.1] * 20_000)
    assert price(many, delta=1e-5).pure == pure_loss(many)
    assert pure_loss([]) == 0


def test_pure_loss_of_selections_and_gaussians() -> None:
    assert pure_loss([update(11, 5.0), SelectionRelease("exponential", 3, 0.5)]) == pytest.approx(2.7)
    assert pure_loss([update(11, 5.0), GaussianRelease(11, 4.0, 1.0)]) == math.inf
    assert pure_loss([GaussianRelease(11, 4.0, 0.0)]) == 0


def test_any_two_values_are_two_radii_apart_but_a_selection_is_counted_once() -> None:
    found = price([update(11, 5.0, radius=0.3)] * 3 + [SelectionRelease("randomized-argmin", 3, 0.5)], delta=1e-5)
    assert found.pure == pytest.approx(3 * 2.2 + 0.5)
    assert found.local_pure == pytest.approx(2 * 3 * 2.2 + 0.5)


def test_the_tight_prices_of_one_release_are_exact() -> None:
    found = price([update(11, 5.0)], delta=1e-5)
    assert found.tight == pytest.approx(L2LaplaceLoss(11, 2.2).epsilon(1e-5), rel=1e-9)
    assert found.local_tight == pytest.approx(L2LaplaceLoss(11, 4.4).epsilon(1e-5), rel=1e-9)
    found = price([SelectionRelease("randomized-argmin", 3, 0.5)], delta=1e-2)
    assert found.tight == found.local_tight == pytest.approx(ResponseLoss(3, 0.5).epsilon(1e-2), rel=1e-9)
    found = price([GaussianRelease(11, 4.0, 1.0)] * 9, delta=1e-5)
    assert found.tight == pytest.approx(GaussianLoss(0.75).epsilon(1e-5), rel=1e-9)
    assert found.local_tight == pytest.approx(GaussianLoss(1.5).epsilon(1e-5), rel=1e-9)


def test_an_unknown_selection_is_priced_as_the_worst_with_its_epsilon() -> None:
    unknown = price([SelectionRelease("somebody's own", 10, 0.5)] * 4, delta=1e-3).tight
    known = price([SelectionRelease("randomized-argmin", 10, 0.5)] * 4, delta=1e-3).tight
    assert known < unknown
    assert unknown == price([SelectionRelease("randomized-argmin", 2, 0.5)] * 4, delta=1e-3).tight


def test_layers_are_priced_as_the_product_of_their_pairs() -> None:
    together = price([layered(8, 3, multiplier=3.0)], delta=1e-5)
    apart = price([update(8, 3.0), update(3, 3.0)], delta=1e-5)
    assert (together.pure, together.tight) == (apart.pure, apart.tight)
    assert together.tight != price([update(11, 3.0)], delta=1e-5).tight


def test_a_radius_of_zero_costs_nothing() -> None:
    found = price([UpdateRelease(Neighbourhood.FIXED, (Noise(3, 1.0, 0.0),))], delta=1e-5)
    assert (found.pure, found.tight, found.releases) == (0, 0, 1)


def test_relative_releases_are_labelled_and_have_no_local_price() -> None:
    fixed = price([update(11, 5.0)] * 2, delta=1e-5)
    mixed = price([update(11, 5.0), update(11, 5.0, radius=0.2, mode=Neighbourhood.RELATIVE)], delta=1e-5)
    assert fixed.formal
    assert fixed.notes == ()
    assert not mixed.formal
    assert mixed.notes[0].startswith("1 of 2 releases: relative-mode releases are priced by the paper's heuristic")
    assert mixed.pure == pytest.approx(fixed.pure)
    assert mixed.local_pure == mixed.local_tight == math.inf


def test_gaussian_releases_say_why_there_is_no_pure_price() -> None:
    found = price([GaussianRelease(11, 4.0, 1.0)], delta=1e-5)
    assert found.pure == math.inf
    assert found.tight < math.inf
    assert found.notes == ("Gaussian noise has no finite pure loss: its price exists only together with a delta",)


def test_what_cannot_be_composed_falls_back_to_the_pure_price_and_says_so() -> None:
    found = price([update(11, 5.0)] * 10, delta=1e-15)
    assert found.tight == found.pure
    assert "it is the pure price" in found.notes[0]
    huge = price([update(11, 1e-290)] * 3, delta=1e-5)
    assert huge.tight == huge.pure == pytest.approx(3.3e291)


def test_distances_that_differ_by_rounding_alone_are_one_kind() -> None:
    equal = [update(11, 5.0)] * 400
    nearly = [update(11, 5.0, radius=0.1 + 0.001 * index) for index in range(400)]
    assert price(nearly, delta=1e-5).tight == pytest.approx(price(equal, delta=1e-5).tight, rel=1e-9)


def test_many_different_releases_are_rounded_up_together_and_only_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [update(50, 10 + index / 10) for index in range(60)]
    exact = price(events, delta=1e-5)
    monkeypatch.setattr(accounting, "_MOST_KINDS", 20)
    rounded = price(events, delta=1e-5)
    assert exact.tight * 1.0001 < rounded.tight < 1.05 * exact.tight  # twenty kinds are few: at most 6 % of a distance
    assert rounded.pure == exact.pure


def test_the_gaussian_limit_is_the_golden_number() -> None:
    accountant = Accountant()
    for rounds, limit in ((1, 2.738), (6, 7.76), (10, 10.60)):
        accountant.add([update(11, 5.0)], times=rounds - accountant.price(delta=1e-5).releases)
        assert accountant.gaussian_limit(delta=1e-5) == pytest.approx(limit, abs=6e-3)
    assert Accountant().gaussian_limit(delta=1e-5) == 0
    accountant.add([SelectionRelease("exponential", 3, 0.5)])
    with pytest.raises(ValueError, match="found a selection"):
        accountant.gaussian_limit(delta=1e-5)


BAD_EVENTS: dict[str, tuple[object, str]] = {
    "type": ("update", "release event of a known type, found str"),
    "no layers": (UpdateRelease(Neighbourhood.FIXED, ()), "at least one layer, found none"),
    "dimension": (UpdateRelease(Neighbourhood.FIXED, (Noise(0, 1.0, 1.0),)), "dimension .* found 0"),
    "epsilon": (UpdateRelease(Neighbourhood.FIXED, (Noise(3, 0.0, 1.0),)), "epsilon > 0 and finite, found 0.0"),
    "radius": (UpdateRelease(Neighbourhood.FIXED, (Noise(3, 1.0, -1.0),)), "radius >= 0 and finite, found -1.0"),
    "nan": (UpdateRelease(Neighbourhood.FIXED, (Noise(3, 1.0, math.nan),)), "radius >= 0 and finite, found nan"),
    "product": (UpdateRelease(Neighbourhood.FIXED, (Noise(3, 1e200, 1e200),)), "epsilon times radius .* found inf"),
    "sigma": (GaussianRelease(3, 0.0, 1.0), "sigma > 0 and finite, found 0.0"),
    "selection": (SelectionRelease("exponential", 3, -0.5), "epsilon >= 0 and finite, found -0.5"),
    "hypotheses": (SelectionRelease("exponential", 0, 0.5), "hypotheses .* found 0"),
}


@pytest.mark.parametrize("name", BAD_EVENTS)
def test_a_bad_event_is_an_error_that_counts_nothing(name: str) -> None:
    event, message = BAD_EVENTS[name]
    accountant = Accountant()
    accountant.add([update(11, 5.0)])
    before = accountant.price(delta=1e-5)
    with pytest.raises(ValueError, match=message):
        accountant.add([update(11, 5.0), event])  # type: ignore[list-item]
    assert accountant.price(delta=1e-5) == before
    with pytest.raises(ValueError, match=message):
        pure_loss([event])  # type: ignore[list-item]


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, 2.0])
def test_a_delta_outside_its_range_is_an_error(delta: float) -> None:
    with pytest.raises(ValueError, match="delta above 0 and below 1"):
        price([], delta=delta)


def test_a_price_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        price([], delta=1e-5).pure = 1.0  # type: ignore[misc]


def test_adding_up_pure_losses_does_not_import_what_only_tight_prices_need() -> None:
    """A fleet of clients holds this module in memory once each; dp_accounting takes four times its size."""
    code = "import sys, coterie.mechanisms.accounting as a; a.pure_loss([]); print('dp_accounting' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
