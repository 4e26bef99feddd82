"""Second chances for idle hypotheses, starts, and the warning that clusters have collapsed."""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie.config import Assignment, Reseed, RunSettings, Start, Weighting
from coterie.protocol import UpdateReply, Vector
from coterie.server.hypotheses import average
from coterie.server.reseeding import (
    Choices,
    Reseeded,
    ReseedSettings,
    collapsed,
    draws_of_round,
    reseed,
    starting,
)

ALPHA = 1e-9
HYPOTHESES = np.array([[3, 4], [10, 0], [0, 10]], np.float32)


def rounds(
    counts: Iterable[Sequence[int]], settings: ReseedSettings, hypotheses: Vector = HYPOTHESES, seed: int = 0
) -> list[Reseeded]:
    """Re-seeding after each of the rounds, whose updates changed nothing."""
    state, made = Reseeded(hypotheses, Choices(), ()), list[Reseeded]()
    for number, row in enumerate(counts, 1):
        state = reseed(state.hypotheses, row, state.choices, settings, rng=partial(draws_of_round, seed, number))
        made.append(state)
    return made


def when(made: list[Reseeded]) -> list[tuple[int, ...]]:
    return [state.indices for state in made]


def test_the_settings_of_a_run_are_taken() -> None:
    run = RunSettings(task="t", reseed=Reseed.OFF, reseed_after=7)
    assert ReseedSettings.of(run) == ReseedSettings(reseed=Reseed.OFF, after=7)
    assert RunSettings(task="t").reseed is Reseed.ON


@pytest.mark.parametrize("after", [1, 2, 5])
def test_an_idle_hypothesis_is_reseeded_after_exactly_so_many_rounds_and_again_after_as_many(after: int) -> None:
    made = rounds([(5, 0, 5)] * (3 * after), ReseedSettings(after=after))
    assert [number for number, found in enumerate(when(made), 1) if found] == [after, 2 * after, 3 * after]
    assert set(when(made)) <= {(), (1,)}


def test_one_choice_starts_the_wait_anew() -> None:
    counts = [(9, 0, 9), (9, 0, 9), (9, 1, 8), (9, 0, 9), (9, 0, 9), (9, 0, 9)]
    assert when(rounds(counts, ReseedSettings(after=3))) == [()] * 5 + [(1,)]


def test_a_round_without_updates_says_nothing_about_anybody() -> None:
    made = rounds([(9, 0, 9), (0, 0, 0), (0, 0, 0), (9, 0, 9)], ReseedSettings(after=2))
    assert when(made) == [(), (), (), (1,)]
    assert made[2] == Reseeded(HYPOTHESES, made[0].choices, ())


@pytest.mark.parametrize(("chosen", "idle"), [(0, (1,)), (4, (1,)), (5, ()), (6, ())])
def test_less_than_one_percent_of_the_choices_is_idle(chosen: int, idle: tuple[int, ...]) -> None:
    counts = [(50, 0, 50)] * 4 + [(50, chosen, 50 - chosen)]  # 500 in 5 rounds
    assert when(rounds(counts, ReseedSettings()))[-1] == idle


def test_of_many_hypotheses_with_even_shares_none_is_idle() -> None:
    even = rounds([[1] * 150 + [0]] * 5, ReseedSettings(), np.ones((151, 2), np.float32))
    assert when(even)[-1] == (150,)  # each of the others had less than 1 %


def test_a_single_hypothesis_is_never_idle() -> None:
    assert not any(when(rounds([(3,)] * 20, ReseedSettings(after=1), HYPOTHESES[:1])))


def test_the_copy_is_of_the_most_populated_over_the_window_and_not_in_the_last_round() -> None:
    near = ReseedSettings(after=3, perturbation=1e-3)
    last = rounds([(2, 0, 9), (2, 0, 9), (9, 0, 2)], near)[-1].hypotheses
    np.testing.assert_allclose(last[1], HYPOTHESES[2], atol=0.1)
    tie = rounds([(2, 0, 3), (3, 0, 3), (3, 0, 2)], near)[-1].hypotheses
    np.testing.assert_allclose(tie[1], HYPOTHESES[0], atol=0.1)


@pytest.mark.parametrize(("actual", "accepted"), [(1.0, True), (1.05, False), (0.95, False)])
@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_the_displacement_is_normal_with_a_deviation_relative_to_the_model(
    scale: float, actual: float, accepted: bool
) -> None:
    """‖copy − θ‖²/σ² is χ² with n degrees of freedom; σ off by 5 % must be seen."""
    size, settings = 10_000, ReseedSettings(after=1, perturbation=0.05 * actual)
    model = scale * np.random.default_rng(1).uniform(1, 3, size)
    made = rounds([(1, 0)], settings, np.stack([model, np.zeros(size)]).astype(np.float32))[-1]
    displacement = made.hypotheses[1].astype(np.float64) - model
    deviation = 0.05 * np.sqrt(np.mean(model**2))
    statistic = np.sum(displacement**2) / deviation**2
    both_sides = 2 * min(stats.chi2.cdf(statistic, size), stats.chi2.sf(statistic, size))
    assert bool(both_sides > ALPHA) is accepted
    assert made.hypotheses.dtype == np.float32


def test_copies_differ_from_their_model_from_each_other_and_from_round_to_round() -> None:
    made = rounds([(9, 0, 0)] * 2, ReseedSettings(after=1))
    rows = [HYPOTHESES[0], *made[0].hypotheses[1:], *made[1].hypotheses[1:]]
    assert made[0].indices == (1, 2)
    assert len({row.tobytes() for row in rows}) == 5


def test_equal_seeds_and_rounds_give_equal_copies() -> None:
    first, again, other = (rounds([(9, 0, 0)], ReseedSettings(after=1), seed=seed)[-1].hypotheses for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_model_of_zeros_has_copies_of_zeros() -> None:
    made = rounds([(9, 0)], ReseedSettings(after=1), np.array([[0, 0], [7, 7]], np.float32))[-1]
    np.testing.assert_array_equal(made.hypotheses, np.zeros((2, 2)))


def test_copies_of_the_largest_numbers_are_finite() -> None:
    largest = float(np.finfo(np.float32).max)
    made = rounds([(9, 0)], ReseedSettings(after=1), np.array([[largest, -largest], [0, 0]], np.float32))[-1]
    assert np.isfinite(made.hypotheses).all()


any_rounds = st.integers(2, 4).flatmap(
    lambda k: st.lists(st.lists(st.sampled_from([0, 0, 0, 1, 2, 60, 300]), min_size=k, max_size=k), max_size=12)
)


@given(counts=any_rounds, after=st.integers(1, 4), seed=st.integers(0, 9))
def test_whoever_has_clients_is_left_alone(counts: list[list[int]], after: int, seed: int) -> None:
    k = len(counts[0]) if counts else 2
    start = np.arange(1, 3 * k + 1, dtype=np.float32).reshape(k, 3)
    before, told = start, list[list[int]]()
    for row, state in zip(counts, rounds(counts, ReseedSettings(after=after), start, seed), strict=True):
        told += [row] if any(row) else []
        window = np.sum(told[-after:], axis=0) if told else np.zeros(k)
        for j in range(k):
            if j not in state.indices:
                np.testing.assert_array_equal(state.hypotheses[j], before[j])
            else:
                assert len(told) >= after
                assert window[j] == 0 or window[j] < 0.01 * window.sum()
                assert j != int(np.argmax(window))
        # What is remembered is the rounds themselves, and no more of them than are needed.
        assert [list(kept) for kept in state.choices.recent] == told[-after:]
        before = state.hypotheses
    np.testing.assert_array_equal(start, np.arange(1, 3 * k + 1, dtype=np.float32).reshape(k, 3))


@given(counts=any_rounds, after=st.integers(1, 4))
def test_off_is_the_published_algorithm(counts: list[list[int]], after: int) -> None:
    start = np.arange(8, dtype=np.float32).reshape(4, 2)[: len(counts[0]) if counts else 2]
    off = rounds(counts, ReseedSettings(Reseed.OFF, after=after), start)
    on = rounds(counts, ReseedSettings(after=after), start)
    for with_it, without in zip(on, off, strict=True):
        assert without.indices == ()
        np.testing.assert_array_equal(without.hypotheses, start)
        assert with_it.choices.recent == without.choices.recent  # so that the warning works without re-seeding


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ([(9, 0, 0)] * 3, True),
        ([(0, 0, 9)] * 3, True),
        ([(0, 9, 0), (0, 9, 0), (9, 0, 0)], False),  # all move together, yet two are chosen
        ([(9, 9, 0)] * 3, False),  # one of three idle
        ([(9, 0, 0)] * 2, False),  # too few rounds to tell
        ([(9, 0, 0), (9, 0, 0), (0, 0, 0)], False),  # the last says nothing
        ([(9, 0, 0), (9, 0, 0), (0, 0, 0), (9, 0, 0)], True),
        ([(3, 3, 3)] * 9 + [(9, 0, 0)] * 3, True),  # only the last three count
        ([(9, 0, 0)] * 3 + [(8, 1, 0)], False),
        ([(100, 0, 0), (100, 0, 0), (100, 2, 0)], True),  # 2 of 302
        ([(100, 0, 0), (100, 0, 0), (100, 4, 0)], False),  # 4 of 304
        ([(9,)] * 3, False),  # one hypothesis is all there is
        ([], False),
        ([(0, 0)] * 3, False),
    ],
)
def test_collapsed_is_all_but_one_idle(counts: list[tuple[int, ...]], found: bool) -> None:
    for mode in Reseed:
        assert collapsed(counts, ReseedSettings(mode, after=3)) is found


def gaussian(seed: int, scale: float = 1.0, size: int = 2) -> list[Vector]:
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_normal(size)).astype(np.float32) for _ in range(40)]


def test_independent_and_shared_starts() -> None:
    draws = gaussian(0)
    starts = [
        starting(draws.__getitem__, 3, start, rng=np.random.default_rng(0))
        for start in (Start.INDEPENDENT, Start.SHARED)
    ]
    np.testing.assert_array_equal(starts[0], draws[:3])
    np.testing.assert_array_equal(starts[1], [draws[0]] * 3)


def test_spread_starts_are_draws_that_lie_further_apart_than_independent_ones() -> None:
    def nearest_pair(hypotheses: Vector) -> float:
        gaps = np.linalg.norm(hypotheses[:, None] - hypotheses, axis=2)
        return float(np.min(gaps[np.triu_indices(len(gaps), 1)]))

    further = 0
    for seed in range(300):
        draws = gaussian(seed)
        spread = starting(draws.__getitem__, 3, Start.SPREAD, rng=np.random.default_rng(seed))
        again = starting(draws.__getitem__, 3, Start.SPREAD, rng=np.random.default_rng(seed))
        np.testing.assert_array_equal(spread, again)
        assert spread.dtype == np.float32
        assert {row.tobytes() for row in spread} <= {row.tobytes() for row in draws[:30]}
        np.testing.assert_array_equal(spread[0], draws[0])
        further += nearest_pair(spread) > nearest_pair(np.stack(draws[:3]))
    assert stats.binom.sf(further - 1, 300, 0.5) < ALPHA


def test_a_task_whose_draws_are_all_equal_can_be_spread() -> None:
    constant = starting(lambda j: np.ones(3, np.float32), 4, Start.SPREAD, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(constant, np.ones((4, 3)))


GROUPS = np.array([[1.0, 0.0], [-1.0, 0.0]])  # what each of two groups of clients wants


def two_groups(seed: int, settings: ReseedSettings, start: Start) -> tuple[Vector, list[tuple[int, ...]]]:
    """30 rounds of 10 clients a group, who go halfway to what they want and add noise; the counts of each round."""
    draws, noise = gaussian(seed, scale=8.0), np.random.default_rng([seed, 1])
    hypotheses = starting(draws.__getitem__, 2, start, rng=np.random.default_rng(seed))
    choices, history = Choices(), list[tuple[int, ...]]()
    for number in range(1, 31):
        updates = []
        for wanted in np.repeat(GROUPS, 10, axis=0):
            j = int(np.argmin(np.linalg.norm(hypotheses - wanted, axis=1)))
            vector = hypotheses[j] + 0.5 * (wanted - hypotheses[j]) + 0.2 * noise.standard_normal(2)
            updates.append(UpdateReply("r", vector.astype(np.float32), j, None))
        averaged = average(hypotheses, updates, Assignment.CLIENT, Weighting.EQUAL)
        made = reseed(
            averaged.hypotheses, averaged.counts, choices, settings, rng=partial(draws_of_round, seed, number)
        )
        hypotheses, choices = made.hypotheses, made.choices
        history.append(averaged.counts)
    return hypotheses, history


def separate(hypotheses: Vector) -> bool:
    gaps = np.linalg.norm(hypotheses[:, None] - GROUPS, axis=2)  # (hypothesis, group)
    return bool(min(gaps[0, 0] + gaps[1, 1], gaps[0, 1] + gaps[1, 0]) < 1.0)


def test_two_groups_that_collapse_as_published_separate_with_reseeding() -> None:
    off, on = ReseedSettings(Reseed.OFF), ReseedSettings()
    collapses = 0
    for seed in range(8):
        hypotheses, history = two_groups(seed, off, Start.INDEPENDENT)
        collapses += collapsed(history, off)
        assert collapsed(history, off) is not separate(hypotheses)
        for start in Start:
            hypotheses, history = two_groups(seed, on, start)
            assert separate(hypotheses), (seed, start)
            assert not collapsed(history, on)
    assert collapses >= 6
