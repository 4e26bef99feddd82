"""Label releases are priced apart from all others, in parallel over parts and one after another otherwise."""

import math

import pytest

from coterie.mechanisms.accounting import LABELS_NOTE, Accountant, price, pure_loss
from coterie.mechanisms.events import LabelRelease, Neighbourhood, Noise, SelectionRelease, UpdateRelease
from coterie.mechanisms.labels.accounting import NO_GUARANTEE_NOTE, LabelAccountant, label_price

UPDATE = UpdateRelease(Neighbourhood.FIXED, (Noise(11, 2.2, 1.0),))
SELECTION = SelectionRelease("randomized-argmin", 3, 0.5)


def release(epsilon: float, delta: float = 0.0, partition: str = "", part: int = 0) -> LabelRelease:
    return LabelRelease("randomized-response", 10, epsilon, delta, partition, part)


def test_no_label_release_has_no_price() -> None:
    assert label_price([]) is None
    assert price([UPDATE], delta=1e-5).labels is None


@pytest.mark.parametrize(
    ("events", "epsilon", "delta"),
    [
        ([release(1.0)], 1.0, 0.0),
        ([release(0.05), release(0.95)], 1.0, 0.0),  # a prior's histogram and what is randomized with it
        ([release(1.0, partition="p", part=part) for part in range(4)], 1.0, 0.0),
        (
            [release(1.0, partition="p", part=1), release(2.0, partition="p"), release(1.5, partition="p", part=1)],
            2.5,
            0,
        ),
        ([release(1.0, partition="p"), release(1.0, partition="q", part=1)], 2.0, 0.0),
        ([release(1.0), release(1.0, partition="q", part=1)], 2.0, 0.0),
        ([release(1.0, 1e-3), release(0.5, 1e-4)], 1.5, 1.1e-3),
        ([release(1.0, 1e-3, "p", 0), release(2.0, 1e-4, "p", 1)], 2.0, 1e-3),  # the larger of each
        ([release(0.1, 0.6), release(0.1, 0.6)], 0.2, 1.0),
    ],
)
def test_composition(events: list[LabelRelease], epsilon: float, delta: float) -> None:
    for order in (events, events[::-1]):
        found = label_price(order)
        assert found is not None
        assert found.epsilon == pytest.approx(epsilon, rel=1e-15)
        assert found.delta == pytest.approx(delta, rel=1e-15)
        assert found.releases == len(events)
        assert found.formal
        assert found.notes == ()


def test_many_times_is_as_often_one_time() -> None:
    accountant = LabelAccountant()
    accountant.add([release(0.1)], times=10)
    found = accountant.price()
    assert found is not None
    assert (found.releases, found.epsilon) == (10, 1.0)


def test_a_release_without_a_guarantee_leaves_none() -> None:
    found = label_price([release(1.0, 1e-6), LabelRelease("wtd-lba", 40, math.inf)])
    assert found is not None
    assert math.isinf(found.epsilon)
    assert not found.formal
    assert found.notes == (NO_GUARANTEE_NOTE,)


def test_label_and_update_guarantees_are_never_added() -> None:
    alone = price([UPDATE, SELECTION], delta=1e-5)
    both = price([UPDATE, release(3.0), SELECTION], delta=1e-5)
    for name in ("releases", "pure", "tight", "local_pure", "local_tight", "formal"):
        assert getattr(both, name) == getattr(alone, name)
    assert both.labels == label_price([release(3.0)])
    assert LABELS_NOTE in both.notes
    assert LABELS_NOTE not in alone.notes
    accountant = Accountant()
    accountant.add([UPDATE, release(3.0), SELECTION])
    assert accountant.pure == pure_loss([UPDATE, SELECTION])


def test_labels_alone() -> None:
    only = price([release(3.0), LabelRelease("wtd-lba", 40, math.inf)], delta=1e-5)
    assert (only.releases, only.pure, only.tight) == (0, 0.0, 0.0)
    assert only.labels is not None
    assert math.isinf(only.labels.epsilon)
    assert only.notes == (LABELS_NOTE, NO_GUARANTEE_NOTE)


def test_the_composed_pure_loss_refuses_a_label_release() -> None:
    with pytest.raises(ValueError, match="under d-privacy, found a label release"):
        pure_loss([UPDATE, release(1.0)])


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (release(-1.0), "epsilon >= 0, found -1.0"),
        (release(math.nan), "epsilon >= 0, found nan"),
        (release(1.0, 1.0), "delta from 0 to below 1, found 1.0"),
        (release(1.0, math.nan), "delta from 0 to below 1, found nan"),
        (release(1.0, partition="p", part=-1), "part .* found -1"),
        (release(1.0, part=1), "part 0 of the division into all examples, found 1"),
        (LabelRelease("x", -1, 1.0), "examples .* found -1"),
        (UPDATE, "a label release, found UpdateRelease"),
    ],
)
def test_a_bad_event_is_one_error_and_nothing_is_counted(event: LabelRelease, message: str) -> None:
    accountant = LabelAccountant()
    with pytest.raises(ValueError, match=message):
        accountant.add([release(1.0), event])
    assert accountant.price() is None
    if isinstance(event, LabelRelease):
        both = Accountant()
        with pytest.raises(ValueError, match=message):
            both.add([UPDATE, event])
        assert both.price(delta=0.1).releases == 0
