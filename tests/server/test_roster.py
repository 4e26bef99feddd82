"""Who validates and who is sampled: exact counts, stable, and free of float node ids."""

from collections import Counter

import pytest

from coterie.server.roster import Roster, position

NAMES = [f"client {j}" for j in range(100)]


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"),
    [(100, 0.2, 20), (100, 0.0, 0), (20, 0.3, 6), (7, 0.3, 2), (3, 0.2, 1), (2, 0.2, 0), (2, 0.99, 1), (1, 0.9, 0)],
)
def test_exactly_the_fraction_is_held_out_and_never_everyone(count: int, fraction: float, held_out: int) -> None:
    roster = Roster.split(NAMES[:count], fraction, seed=3)
    assert sum(map(roster.validates, NAMES[:count])) == held_out


def test_nobody_yet_means_nobody_is_held_out() -> None:
    assert not Roster.split([], 0.5, seed=3).validates("client 1")


def test_the_split_depends_on_seed_and_set_and_not_on_order() -> None:
    def held_out(names: list[str], seed: int) -> set[str]:
        return set(filter(Roster.split(names, 0.3, seed).validates, names))

    assert held_out(NAMES, 1) == held_out(NAMES[::-1], 1)
    assert held_out(NAMES, 1) != held_out(NAMES, 2)


def test_later_joiners_leave_everyone_where_they_are() -> None:
    roster = Roster.split(NAMES[:50], 0.2, seed=1)
    before = [roster.validates(name) for name in NAMES[:50]]
    later = [roster.validates(f"late {j}") for j in range(1000)]
    assert [roster.validates(name) for name in NAMES[:50]] == before
    # The threshold is the 11th of 50 uniform positions: Beta(11, 40). P(outside) < 1e-9.
    assert 10 < sum(later) < 650


def test_a_sample_has_no_repetition_and_no_stranger() -> None:
    roster = Roster.split(NAMES, 0.0, seed=1)
    for number in range(50):
        sample = roster.sample(NAMES, 10, number)
        assert len(sample) == len(set(sample)) == 10
        assert set(sample) <= set(NAMES)
        assert all(type(name) is str for name in sample)


def test_a_sample_is_fixed_by_seed_round_and_set() -> None:
    roster = Roster.split(NAMES, 0.0, seed=1)
    assert roster.sample(NAMES, 10, 4) == roster.sample(NAMES[::-1], 10, 4)
    assert roster.sample(NAMES, 10, 4) != roster.sample(NAMES, 10, 5)
    assert roster.sample(NAMES, 10, 4) != Roster(2, 0.0).sample(NAMES, 10, 4)


def test_everybody_is_taken_when_there_are_too_few() -> None:
    assert sorted(Roster(1, 0.0).sample(NAMES[:5], 10, 1)) == NAMES[:5]
    assert Roster(1, 0.0).sample([], 10, 1) == []


def test_everybody_has_the_same_chance() -> None:
    roster, rounds = Roster(7, 0.0), 2000
    chosen = Counter(name for number in range(rounds) for name in roster.sample(NAMES[:20], 5, number))
    # Binomial(2000, 1/4): sd 19.4; 7 sd on either side for 20 clients is P < 1e-10.
    assert all(abs(chosen[name] - rounds / 4) < 7 * 19.4 for name in NAMES[:20])


def test_positions_are_spread_over_the_unit_interval() -> None:
    places = sorted(position(f"client {j}", 0) for j in range(10_000))
    assert places[0] >= 0
    assert places[-1] < 1
    # Kolmogorov: P(sup |F_n − F| > 0.034) = 2·exp(−2·n·0.034²) < 1e-9.
    assert max(abs(place - j / 10_000) for j, place in enumerate(places)) < 0.034
