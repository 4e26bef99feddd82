"""Prices of a run's clients: the deployed ledger's, for one client and for all of them."""

import numpy as np
import pytest

from coterie.mechanisms.accounting import price
from coterie.mechanisms.events import Neighbourhood, Noise, ReleaseEvent, SelectionRelease, UpdateRelease
from coterie.mechanisms.layerwise import FixedNeighbourhood, LayerwiseLaplace, RelativeNeighbourhood
from coterie.mechanisms.selection import RandomizedArgmin
from coterie.rng import seeded
from coterie.simulation.privacy import DELTA, price_of, prices_of_all
from coterie.simulation.privacy import _price as privacy_price

MECHANISM = LayerwiseLaplace((8, 3), 5.0, FixedNeighbourhood((0.5, 0.2)))
# ε_l = n_l/(ν·C_l), written out.
UPDATE = UpdateRelease(Neighbourhood.FIXED, (Noise(8, 8 / (5 * 0.5), 0.5), Noise(3, 3 / (5 * 0.2), 0.2)))
CHOICE = SelectionRelease("randomized-argmin", 3, 0.7)


@pytest.mark.parametrize("choice", [None, CHOICE])
def test_every_client_pays_what_a_ledger_of_its_releases_says(choice: SelectionRelease | None) -> None:
    participations = np.array([0, 3, 1, 3, 0, 2], np.int32)
    found = prices_of_all(MECHANISM, participations, choice)
    assert found is not None
    assert found.delta == DELTA
    assert found.formal
    for place, times in enumerate(participations.tolist()):
        once: list[ReleaseEvent] = [UPDATE] if choice is None else [choice, UPDATE]
        expected = price(times * once, delta=DELTA)
        assert found.pure[place] == pytest.approx(expected.pure, rel=1e-12)
        assert found.tight[place] == pytest.approx(expected.tight, rel=1e-9)
        assert found.local_pure[place] == pytest.approx(expected.local_pure, rel=1e-12)
        assert found.local_tight[place] == pytest.approx(expected.local_tight, rel=1e-9)
        one = price_of(MECHANISM, times, choice)
        assert one is not None
        assert (one.releases, one.pure, one.tight) == (times, found.pure[place], found.tight[place])
        assert (one.local_pure, one.local_tight) == (found.local_pure[place], found.local_tight[place])
    # By hand: n/ν and ε_s for each time.
    each = 11 / 5 + (0 if choice is None else 0.7)
    assert found.pure == pytest.approx(each * participations)
    # Twice the distance, but the choice protects any two to begin with.
    assert found.local_pure == pytest.approx((each + 11 / 5) * participations)


def test_a_million_clients_are_priced_by_their_distinct_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.simulation import privacy

    asked: list[int] = []

    def counting(events: tuple[ReleaseEvent, ...], times: int) -> privacy.SimulatedPrice:
        asked.append(times)
        return privacy_price(events, times)

    monkeypatch.setattr(privacy, "_price", counting)
    participations = seeded(1).binomial(5, 0.1, 1_000_000).astype(np.int32)
    found = prices_of_all(MECHANISM, participations)
    assert found is not None
    assert asked == [0, 1, 2, 3, 4, 5]
    assert found.pure.shape == found.tight.shape == (1_000_000,)
    assert np.array_equal(found.pure == 0, participations == 0)
    assert (found.tight <= found.pure).all()


def test_what_a_price_covers_is_said_and_no_more() -> None:
    (same, plain), (any_two, private) = (
        prices.notes for prices in (price_of(MECHANISM, 2), price_of(MECHANISM, 2, CHOICE)) if prices
    )
    for note in (same, any_two):
        assert "within the clipping norm C of each other in every layer, in each release" in note
    assert "that choose the same hypothesis in each release" in same
    assert "any two that choose the same hypothesis" in same
    assert "choose the same hypothesis" not in any_two
    assert "any two data sets of one client" in any_two
    assert "which hypothesis was chosen and the losses of held-out clients are not covered" in plain
    assert "and of its private choices" in private
    assert "the losses of held-out clients are not covered" in private
    assert "which hypothesis was chosen" not in private
    for note in (plain, private):
        assert "protects nobody" in note
    relative = LayerwiseLaplace((8, 3), 5.0, RelativeNeighbourhood((0.1, 0.1)))
    found = prices_of_all(relative, np.array([1, 2]), RandomizedArgmin(0.7).event(3))
    assert found is not None
    assert not found.formal
    assert any("no d-privacy" in note for note in found.notes)
    assert any("the paper's heuristic gives, and no guarantee for any two data sets" in note for note in found.notes)
    assert not any("within the clipping norm" in note for note in found.notes)
    assert np.isinf(found.local_pure).all()
    assert np.isinf(found.local_tight).all()


def test_so_many_releases_that_composing_them_would_fill_the_memory_pay_the_pure_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from coterie.simulation import privacy

    found = price_of(MECHANISM, 2**31 - 1, CHOICE)
    assert found is not None
    assert found.releases == 2**31 - 1
    assert found.tight == found.pure == pytest.approx((11 / 5 + 0.7) * (2**31 - 1), rel=1e-12)
    assert found.local_tight == found.local_pure == pytest.approx((22 / 5 + 0.7) * (2**31 - 1), rel=1e-12)
    assert any("is not computed: it is the pure price" in note for note in found.notes)
    # Where both ways can be taken, the pure prices are the same and the tight ones no less.
    composed = price_of(MECHANISM, 50)
    privacy._price.cache_clear()
    monkeypatch.setattr(privacy, "_MOST_COMPOSED", 49)
    scaled = price_of(MECHANISM, 50)
    privacy._price.cache_clear()
    assert composed is not None
    assert scaled is not None
    assert (scaled.pure, scaled.local_pure) == pytest.approx((composed.pure, composed.local_pure), rel=1e-12)
    assert scaled.tight > composed.tight
    assert not any("not computed" in note for note in composed.notes)


def test_without_noise_there_is_no_price() -> None:
    assert price_of(None, 3) is None
    assert price_of(None, 3, CHOICE) is None
    assert prices_of_all(None, np.array([1, 2]), CHOICE) is None
