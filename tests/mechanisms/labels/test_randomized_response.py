"""Randomized response on labels: golden vectors, the linear program's optimum, ε as a ratio, laws by chi-square."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import optimize, stats

from coterie import rng
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels import randomized_response
from coterie.mechanisms.labels.randomized_response import (
    RandomizedResponse,
    RandomizedResponseWithPrior,
    TopKRandomizedResponse,
    top_k,
)
from coterie.mechanisms.randomness import NoiseSource

ALPHA = 1e-9
PRIORS = st.integers(2, 8).flatmap(
    lambda k: st.lists(st.floats(0, 1), min_size=k, max_size=k).filter(lambda prior: sum(prior) > 0)
)
EPSILONS = st.floats(0.01, 12)


def p_value(outputs: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """Chi-square of ``outputs`` against ``law``; an output of probability 0 gives 0."""
    counts = np.bincount(outputs, minlength=law.size)
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    return float(stats.chisquare(counts[possible], outputs.size * law[possible]).pvalue) if possible.sum() > 1 else 1.0


# papers.md (d): prior, ε, w, k*, keep, other, probability of each member for a label outside (None: there is none).
GOLDEN = [
    ([0.5, 0.3, 0.1, 0.1], 1, [0.5, 0.584847, 0.518505, 0.475367], 2, 0.731059, 0.268941, 0.5),
    ([0.5, 0.3, 0.1, 0.1], 3, [0.5, 0.762059, 0.818499, 0.870049], 4, 0.870049, 0.043317, None),
    ([0.4, 0.35, 0.15, 0.1], 2, [0.4, 0.660598, 0.708287, 0.711235], 4, 0.711235, 0.096255, None),
    ([0.3, 0.25, 0.2, 0.15, 0.1], 0.5, [0.3, 0.342353, 0.338897, 0.319195, 0.291875], 2, 0.622459, 0.377541, 0.5),
    ([0.9] + 9 * [0.1 / 9], 2, [0.9, 0.802504], 1, 1.0, None, 1.0),
    (4 * [0.25], 1, [0.25, 0.365529, 0.432088, 0.475367], 4, 0.475367, 0.174878, None),
]


@pytest.mark.parametrize(("prior", "epsilon", "correct", "k", "keep", "other", "outside"), GOLDEN)
def test_golden_vectors(prior, epsilon, correct, k, keep, other, outside) -> None:
    mechanism = RandomizedResponseWithPrior(len(prior), epsilon)
    assert mechanism.correct_probabilities(np.array(prior))[: len(correct)] == pytest.approx(correct, abs=6e-7)
    assert mechanism.subset_size(prior) == k
    law = mechanism.law(prior)
    assert law[0, 0] == pytest.approx(keep, abs=6e-7)
    if other is not None:
        assert law[0, 1] == pytest.approx(other, abs=6e-7)
    if outside is not None:
        assert law[-1] == pytest.approx([outside] * k + [0.0] * (len(prior) - k), abs=6e-7)


@pytest.mark.parametrize(("prior", "epsilon", "published"), [(*GOLDEN[2][:2], 3), (*GOLDEN[3][:2], 1)])
def test_the_published_code_s_off_by_one_would_give_another_k(prior, epsilon, published) -> None:
    """Negative control: its denominator counts k − 1 where it must count k (papers.md (d), S2)."""
    wrong = [sum(prior[: k + 1]) / (1 + (k - 1) * math.exp(-epsilon)) for k in range(len(prior))]
    assert np.argmax(wrong) + 1 == published
    assert RandomizedResponseWithPrior(len(prior), epsilon).subset_size(prior) != published


@pytest.mark.parametrize(
    ("epsilon", "keep"), [(1, 0.231969), (2, 0.450853), (3, 0.690568), (4, 0.858486), (8, 0.996990)]
)
def test_the_keep_probabilities_of_ten_classes(epsilon: float, keep: float) -> None:
    assert RandomizedResponse(10, epsilon).keep_probability == pytest.approx(keep, abs=6e-7)
    assert RandomizedResponse(10, epsilon).law()[3, 3] == pytest.approx(keep, abs=6e-7)


@pytest.mark.parametrize("epsilon", [1e-16, 1e-9, 0.1, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("classes", [2, 3, 7, 10, 1000])
def test_a_uniform_prior_is_plain_randomized_response(classes: int, epsilon: float) -> None:
    mechanism = RandomizedResponseWithPrior(classes, epsilon)
    for prior in (np.ones(classes), np.full(classes, 1 / classes), np.full(classes, 1 / classes, np.float32)):
        assert mechanism.subset_size(prior) == classes
    if classes <= 10:
        assert np.array_equal(mechanism.law(np.ones(classes)), RandomizedResponse(classes, epsilon).law())


@given(PRIORS, EPSILONS)
def test_no_two_labels_give_a_ratio_above_epsilon(prior: list[float], epsilon: float) -> None:
    classes = len(prior)
    laws = [TopKRandomizedResponse(classes, epsilon).law(prior, k) for k in range(1, classes + 1)]
    for law in (*laws, RandomizedResponseWithPrior(classes, epsilon).law(prior)):
        assert law.sum(axis=1) == pytest.approx(np.ones(classes), rel=1e-12)
        possible = law[:, law.max(axis=0) > 0]  # an output is possible for every label, or for none
        assert (possible > 0).all()
        assert np.log(possible.max(axis=0) / possible.min(axis=0)).max() <= epsilon * (1 + 1e-12) + 1e-12
    attained = np.log(laws[-1].max(axis=0) / laws[-1].min(axis=0)).max()
    assert attained == pytest.approx(epsilon, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("prior", "epsilon"), [(p, e) for p, e, *_ in GOLDEN if len(p) <= 5] + [([0.6, 0.15, 0.15, 0.05, 0.05, 0.0], 1.3)]
)
def test_it_is_the_optimum_of_the_linear_program(prior: list[float], epsilon: float) -> None:
    """Theorem 3: maximize Σ_y p(y)·P(y|y) over all K × K kernels with ratios up to e^ε."""
    size = len(prior)
    rows, rights = [], []
    for output in range(size):
        for label in range(size):
            for other in range(size):
                if label != other:
                    row = np.zeros((size, size))
                    row[label, output], row[other, output] = 1.0, -math.exp(epsilon)
                    rows.append(row.reshape(-1))
                    rights.append(0.0)
    sums = np.kron(np.eye(size), np.ones(size))
    best = optimize.linprog(
        -np.diag(prior).reshape(-1), A_ub=rows, b_ub=rights, A_eq=sums, b_eq=np.ones(size), bounds=(0, 1)
    )
    correct = float(np.diag(RandomizedResponseWithPrior(size, epsilon).law(prior)) @ prior)
    assert correct == pytest.approx(-best.fun, rel=1e-9)


def test_randomized_response_has_its_law(source: NoiseSource) -> None:
    mechanism = RandomizedResponse(5, 1.2)
    for label in (0, 3):
        outputs = mechanism(np.full(20_000, label), rng=source)
        assert p_value(outputs, mechanism.law()[label]) > ALPHA
        for wrong in (RandomizedResponse(5, 1.2 * 1.15), RandomizedResponse(5, 1.2 / 1.15)):
            assert p_value(outputs, wrong.law()[label]) < ALPHA
        assert p_value(outputs, mechanism.law()[1]) < ALPHA


PRIOR = np.array([0.05, 0.4, 0.05, 0.3, 0.2])


@pytest.mark.parametrize("cells", [1 << 19, 33])
@pytest.mark.parametrize("form", ["shared", "each", "groups"])
def test_responses_under_a_prior_have_their_law(source: NoiseSource, form: str, cells: int, monkeypatch) -> None:
    monkeypatch.setattr(randomized_response, "CELLS", cells)
    count = 20_000 if cells > 33 else 5_000
    with_prior, top = RandomizedResponseWithPrior(5, 1.0), TopKRandomizedResponse(5, 1.0)
    for label in (1, 0):  # inside the subset, and outside
        labels = np.full(count, label)
        reverse = np.stack([PRIOR[::-1], PRIOR]).astype(np.float32)
        priors = {"shared": PRIOR, "each": np.tile(PRIOR, (count, 1)), "groups": reverse}[form]
        groups = np.ones(count, int) if form == "groups" else None
        found = with_prior(labels, priors, groups=groups, rng=source)
        assert set(found.subset_sizes) == {with_prior.subset_size(PRIOR)} == {3}
        assert p_value(found.labels, with_prior.law(PRIOR)[label]) > ALPHA
        assert p_value(found.labels, RandomizedResponse(5, 1.0).law()[label]) < ALPHA
        sizes = np.full(len(np.atleast_2d(priors)), 2)
        for k in (2, sizes):
            found = top(labels, priors, k, groups=groups, rng=source)
            assert set(found.subset_sizes) == {2}
            assert p_value(found.labels, top.law(PRIOR, 2)[label]) > ALPHA
            assert p_value(found.labels, top.law(PRIOR, 3)[label]) < ALPHA


def test_every_example_has_its_own_prior_and_k() -> None:
    priors = np.array([[0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.5, 0.0]])
    found = RandomizedResponseWithPrior(4, 30.0)([0, 3, 2], priors, rng=rng.seeded(1))
    assert found.labels.tolist() == [0, 3, 2]  # a large ε keeps what the subset holds
    assert found.subset_sizes.tolist() == [4, 4, 2]
    found = RandomizedResponseWithPrior(4, 0.5)([3, 3, 3], priors, rng=rng.seeded(1))
    assert found.subset_sizes.tolist() == [1, 4, 2]
    assert found.labels[0] == 0
    assert found.labels[2] in (1, 2)


def test_of_equal_priors_the_lowest_labels_come_first() -> None:
    assert top_k(np.array([[0.2, 0.4, 0.2, 0.2], [0.1, 0.1, 0.1, 0.7]]), np.array([2, 3])).tolist() == [
        [True, True, False, False],
        [True, True, False, True],
    ]


def test_only_ratios_of_a_prior_count() -> None:
    for scale in (1e-300, 1.0, 1e300):
        assert RandomizedResponseWithPrior(5, 1.0).subset_size(PRIOR * scale) == 3


class Zeros:
    """A source whose every uniform is the smallest one."""

    def random(self, size: int) -> NDArray[np.float64]:
        return np.zeros(size)


def test_rounding_never_makes_leaving_less_likely() -> None:
    # P(leave) = e^−200 is far below 2⁻⁵³, and the smallest uniform leaves all the same.
    assert RandomizedResponse(2, 200.0)([0, 1], rng=Zeros()).tolist() == [1, 0]
    # … but where the subset is a single label there is nothing to leave it for.
    assert TopKRandomizedResponse(3, 1.0)([2, 0], [0.1, 0.1, 0.8], 1, rng=Zeros()).labels.tolist() == [2, 2]


def test_ten_thousand_classes_with_a_prior_each_stay_within_memory() -> None:
    priors = rng.seeded(2).random((300, 10_000), np.float32)
    labels = rng.seeded(3).integers(10_000, size=300)
    mechanism = RandomizedResponseWithPrior(10_000, 4.0)
    mechanism(labels[:1], priors[:1], rng=rng.seeded(4))
    tracemalloc.start()
    mechanism(labels, priors, rng=rng.seeded(4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A few chunks of 4 MB (the priors are 12 MB, as float64 24 MB); K × K a single row would be 800 MB.
    assert peak < 40e6


def test_no_labels_give_no_outputs() -> None:
    assert RandomizedResponse(3, 1.0)([], rng=rng.secure()).size == 0
    assert RandomizedResponseWithPrior(3, 1.0)([], np.empty((0, 3)), rng=rng.secure()).labels.size == 0


def test_the_record_of_a_release() -> None:
    assert RandomizedResponse(3, 0.5).event(7) == LabelRelease("randomized-response", 7, 0.5)
    record = RandomizedResponseWithPrior(3, 0.5).event(7, partition="p", part=2)
    assert record == LabelRelease("randomized-response-with-prior", 7, 0.5, 0.0, "p", 2)
    assert TopKRandomizedResponse(3, 0.5).event(7).epsilon == 0.5
    for mechanism in (RandomizedResponse, RandomizedResponseWithPrior, TopKRandomizedResponse):
        assert mechanism(3, 0.5).privacy_loss() == 0.5


RR, PRIOR_RR, TOP = RandomizedResponse(3, 1.0), RandomizedResponseWithPrior(3, 1.0), TopKRandomizedResponse(3, 1.0)
G = rng.seeded(1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: RandomizedResponse(1, 1.0), "classes .* >= 2, found 1"),
        (lambda: RandomizedResponse(3, 0.0), "epsilon > 0 and finite, found 0.0"),
        (lambda: RandomizedResponseWithPrior(3, math.nan), "epsilon > 0 and finite, found nan"),
        (lambda: TopKRandomizedResponse(3, -1.0), "epsilon > 0 and finite, found -1.0"),
        (lambda: RR([0, 3], rng=G), "labels from 0 to 2, found 3"),
        (lambda: RR([-1], rng=G), "labels from 0 to 2, found -1"),
        (lambda: RR([0.0, math.nan], rng=G), "labels to hold whole numbers, found dtype float64"),
        (lambda: RR([[0]], rng=G), r"one number per example, found shape \(1, 1\)"),
        (lambda: PRIOR_RR([0], [0.5, 0.6, -0.1], rng=G), "priors >= 0 and finite, found -0.1"),
        (lambda: PRIOR_RR([0], [0.5, math.nan, 0.1], rng=G), "priors >= 0 and finite, found nan"),
        (lambda: PRIOR_RR([0], [0.5, math.inf, 0.1], rng=G), "priors >= 0 and finite, found inf"),
        (lambda: PRIOR_RR([0, 1], [[1, 0, 0], [0, 0, 0]], rng=G), "positive sum, found one of zeros"),
        (lambda: PRIOR_RR([0], [0.5, 0.5], rng=G), r"priors of shape \(3,\) or \(rows, 3\), found \(2,\)"),
        (lambda: PRIOR_RR([0, 1], np.ones((3, 3)), rng=G), "a row for each of 2 examples, found 3"),
        (lambda: PRIOR_RR([0, 1], np.ones((2, 3)), groups=[0], rng=G), "each of 2 examples, found 1"),
        (lambda: PRIOR_RR([0, 1], np.ones((2, 3)), groups=[0, 2], rng=G), "groups from 0 to 1, found 2"),
        (lambda: PRIOR_RR([0], ["a", "b", "c"], rng=G), "priors to hold real numbers"),
        (lambda: PRIOR_RR.law(np.ones((2, 3))), r"one prior of shape \(3,\), found \(2, 3\)"),
        (lambda: TOP([0], [1, 1, 1], 0, rng=G), "subset sizes from 1 to 3, found 0"),
        (lambda: TOP([0], [1, 1, 1], 4, rng=G), "subset sizes from 1 to 3, found 4"),
        (lambda: TOP([0], [1, 1, 1], 1.5, rng=G), "whole numbers, found 1.5"),
        (lambda: TOP([0], [1, 1, 1], np.array([1, 1]), rng=G), "1 number or 1, one per prior, found 2"),
        (lambda: TOP.law([1, 1, 1], 4), "subset sizes from 1 to 3, found 4"),
        (lambda: RR.event(-1), "examples .* >= 0, found -1"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
