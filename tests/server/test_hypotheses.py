"""The arithmetic of a round at the server, against sums computed beside it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.config import Assignment, Weighting
from coterie.protocol import UpdateReply, ValidationReply
from coterie.server.hypotheses import (
    BestSoFar,
    Validation,
    average,
    initial_hypotheses,
    mean_validation,
    nearest,
    problem_with,
    problem_with_validation,
)
from coterie.tasks import Task

CLIENT, SERVER = Assignment.CLIENT, Assignment.SERVER
EQUAL, SAMPLES = Weighting.EQUAL, Weighting.SAMPLES
HYPOTHESES = np.array([[0, 0], [10, 0], [0, 10]], np.float32)
NAN, INF = float("nan"), float("inf")


def update(vector: list[float], hypothesis: int | None = None, rows: int | None = None) -> UpdateReply:
    return UpdateReply("r", np.array(vector, np.float32), hypothesis, rows)


def test_each_cluster_takes_the_mean_and_an_empty_one_keeps_its_hypothesis() -> None:
    updates = [update([1, 2], 0), update([3, 4], 0), update([8, 8], 2)]
    made = average(HYPOTHESES, updates, CLIENT, EQUAL)
    np.testing.assert_array_equal(made.hypotheses, [[2, 3], [10, 0], [8, 8]])
    assert made.counts == (2, 0, 1)
    assert made.hypotheses.dtype == np.float32
    np.testing.assert_array_equal(HYPOTHESES[0], [0, 0])  # the input is left as it is


def test_weights_are_row_counts() -> None:
    updates = [update([1, 0], 1, 30), update([4, 0], 1, 10), update([9, 9], 0, 5)]
    np.testing.assert_allclose(average(HYPOTHESES, updates, CLIENT, SAMPLES).hypotheses[1], [1.75, 0])
    np.testing.assert_allclose(average(HYPOTHESES, updates, CLIENT, EQUAL).hypotheses[1], [2.5, 0])


def test_no_update_changes_nothing() -> None:
    made = average(HYPOTHESES, [], SERVER, EQUAL)
    np.testing.assert_array_equal(made.hypotheses, HYPOTHESES)
    assert made.counts == (0, 0, 0)


def test_the_server_assigns_to_the_nearest_and_ignores_a_sent_index() -> None:
    updates = [update([9, 1], hypothesis=2), update([1, 9]), update([0, 8])]
    made = average(HYPOTHESES, updates, SERVER, EQUAL)
    np.testing.assert_allclose(made.hypotheses, [[0, 0], [9, 1], [0.5, 8.5]])
    assert made.counts == (0, 1, 2)


def test_nearest_is_euclidean_and_ties_go_to_the_lowest_index() -> None:
    vectors = np.array([[5, 0], [0, 5], [5, 5], [6, 5], [-100, -1]], np.float32)
    assert [nearest(HYPOTHESES, vector) for vector in vectors] == [0, 0, 0, 1, 0]
    # L1 would say 0 (distance 1.9 against 2.0), L2 says 1.
    assert nearest(np.array([[1.9, 0], [1, 1]], np.float32), np.zeros(2, np.float32)) == 1


def test_distances_do_not_lose_small_differences_of_large_numbers() -> None:
    known = np.array([[1e8, 0], [1e8, 3]], np.float32)
    assert nearest(known, np.array([1e8, 2], np.float32)) == 1
    far = np.array([[3e38, 3e38], [-3e38, -3e38]], np.float32)
    assert nearest(far, np.array([-3e38, 0], np.float32)) == 1  # no overflow to a tie of infinities


def test_sums_are_in_float64() -> None:
    # In float32 the ones are lost beside 1e8.
    updates = [update([1e8], 0)] + [update([1.0], 0)] * 300 + [update([-1e8], 0)]
    made = average(np.zeros((1, 1), np.float32), updates, CLIENT, EQUAL)
    assert made.hypotheses[0, 0] == pytest.approx(300 / 302, rel=1e-6)


def test_a_mean_of_the_largest_numbers_is_finite() -> None:
    largest = float(np.finfo(np.float32).max)
    updates = [update([largest, -largest], 0, rows) for rows in (3, 7, 11)]
    assert np.isfinite(average(np.zeros((1, 2), np.float32), updates, CLIENT, SAMPLES).hypotheses).all()


@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=2), st.integers(0, 2), st.integers(1, 1000)
        ),
        min_size=1,
        max_size=8,
    ),
    seed=st.randoms(use_true_random=False),
    weighting=st.sampled_from(list(Weighting)),
    assignment=st.sampled_from(list(Assignment)),
)
def test_the_order_of_the_replies_does_not_matter(rows, seed, weighting, assignment) -> None:  # type: ignore[no-untyped-def]
    updates = [update(vector, j, count) for vector, j, count in rows]
    shuffled = list(updates)
    seed.shuffle(shuffled)
    a, b = (average(HYPOTHESES, given, assignment, weighting) for given in (updates, shuffled))
    np.testing.assert_allclose(a.hypotheses, b.hypotheses, rtol=1e-6, atol=1e-6)
    assert a.counts == b.counts
    assert sum(a.counts) == len(updates)


@pytest.mark.parametrize(
    ("reply", "assignment", "weighting", "problem"),
    [
        (update([1, 2], 0), CLIENT, EQUAL, None),
        (update([1, 2], 2, 5), CLIENT, SAMPLES, None),
        (update([1, 2]), SERVER, EQUAL, None),
        (update([1, 2], 77), SERVER, EQUAL, None),  # the index is not used there
        (update([1, 2, 3], 0), CLIENT, EQUAL, "3 numbers, expected 2"),
        (update([], 0), CLIENT, EQUAL, "0 numbers, expected 2"),
        (update([1, NAN], 0), CLIENT, EQUAL, "non-finite"),
        (update([INF, 1], 0), CLIENT, EQUAL, "non-finite"),
        (update([-INF, 1]), SERVER, EQUAL, "non-finite"),
        (update([1, 2], 3), CLIENT, EQUAL, "hypothesis 3, expected 0 to 2"),
        (update([1, 2], -1), CLIENT, EQUAL, "hypothesis -1"),
        (update([1, 2]), CLIENT, EQUAL, "hypothesis None"),
        (update([1, 2], 0), CLIENT, SAMPLES, "no row count"),
    ],
)
def test_what_must_not_meet_the_average(
    reply: UpdateReply, assignment: Assignment, weighting: Weighting, problem: str | None
) -> None:
    found = problem_with(reply, HYPOTHESES, assignment, weighting)
    assert found is None if problem is None else found is not None and problem in found


def test_best_so_far_keeps_the_first_of_equals_and_counts_the_rest() -> None:
    best, seen = BestSoFar(), []
    for number, loss in enumerate([3.0, 2.0, 2.0, 2.5, 1.0, 9.0], 1):
        best = best.observe(number, Validation(loss, 0.0, 1), np.full((1, 1), number, np.float32))
        seen.append((best.round, best.without_improvement))
    assert seen == [(1, 0), (2, 0), (2, 1), (2, 2), (5, 0), (5, 1)]
    assert best.hypotheses is not None
    assert best.hypotheses[0, 0] == 5


@pytest.mark.parametrize(("patience", "over"), [(0, False), (1, True), (2, True), (3, False)])
def test_patience_counts_validations_without_improvement(patience: int, over: bool) -> None:
    assert BestSoFar(without_improvement=2).is_over(patience) is over
    assert not BestSoFar().is_over(patience)


def test_validation_is_the_plain_mean_over_clients() -> None:
    assert mean_validation([]) is None
    replies = [ValidationReply(1.0, 10.0), ValidationReply(2.0, 20.0), ValidationReply(6.0, 60.0)]
    assert mean_validation(replies) == Validation(3.0, 30.0, 3)


@pytest.mark.parametrize(("loss", "score"), [(NAN, 0.0), (INF, 0.0), (-INF, 0.0), (0.0, NAN), (0.0, INF)])
def test_a_validation_that_is_not_finite_is_dropped(loss: float, score: float) -> None:
    assert problem_with_validation(ValidationReply(loss, score)) is not None
    assert problem_with_validation(ValidationReply(0.5, -3.0)) is None


def test_initial_hypotheses_are_independent_and_repeatable(tiny_task: Task) -> None:
    first, layout = initial_hypotheses(tiny_task, 3, seed=5)
    again, _ = initial_hypotheses(tiny_task, 2, seed=5)
    other, _ = initial_hypotheses(tiny_task, 3, seed=6)
    assert (first.shape, first.dtype, layout.size) == ((3, 13), np.float32, 13)
    np.testing.assert_array_equal(first[:2], again)  # hypothesis j does not depend on k
    assert len({row.tobytes() for row in np.concatenate([first, other])}) == 6
