"""LP-MST's state machine: each label once, with its own stage's prior; what is trained on; what it costs."""

import math

import numpy as np
import pytest
from scipy import stats

from coterie import rng
from coterie.mechanisms.labels.accounting import label_price
from coterie.mechanisms.labels.multistage import UNQUERIED, MultiStage, random_stages
from coterie.mechanisms.labels.randomized_response import RandomizedResponse, RandomizedResponseWithPrior
from coterie.mechanisms.randomness import NoiseSource

ALPHA = 1e-9
CERTAIN = RandomizedResponseWithPrior(4, 40.0)  # so large an ε that labels inside their subset stay
STAGES = [1, 0, 0, 2, 1, 0]
LABELS = np.array([3, 2, 1, 0, 3, 0])


def queried(state: MultiStage, priors: object = None) -> MultiStage:
    return state.query(LABELS[state.next_examples], priors, rng=rng.seeded(1))


def test_each_stage_queries_its_own_labels_and_no_others() -> None:
    state = MultiStage.start(CERTAIN, STAGES)
    assert (state.stage, state.stage_count) == (0, 3)
    assert state.labels.tolist() == [UNQUERIED] * 6
    assert state.queried.size == 0
    assert state.next_examples.tolist() == [1, 2, 5]
    first = queried(state)
    assert state.labels.tolist() == [UNQUERIED] * 6  # nothing changes in place
    assert first.labels.tolist() == [-1, 2, 1, -1, -1, 0]
    assert first.subset_sizes.tolist() == [-1, 4, 4, -1, -1, 4]  # a uniform prior: plain randomized response
    assert first.queried.tolist() == [1, 2, 5]
    second = queried(first, [[0, 0, 0, 1], [0.97, 0.01, 0.01, 0.01]])
    assert second.labels.tolist() == [3, 2, 1, -1, 3, 0]
    third = queried(second, np.ones(4))
    assert third.labels.tolist() == LABELS.tolist()
    assert third.next_examples.size == 0
    with pytest.raises(ValueError, match="not queried yet, found all 3 done"):
        third.query([], None, rng=rng.seeded(1))


def test_the_first_stage_is_plain_randomized_response_and_later_ones_follow_their_prior(source: NoiseSource) -> None:
    response = RandomizedResponseWithPrior(4, 1.0)
    state = MultiStage.start(response, np.repeat([0, 1], 10_000))
    state = state.query(np.full(10_000, 2), None, rng=source)
    prior = [0.1, 0.2, 0.6, 0.1]
    state = state.query(np.full(10_000, 2), np.tile(prior, (10_000, 1)), rng=source)
    for stage, law in enumerate((RandomizedResponse(4, 1.0).law()[2], response.law(prior)[2])):
        counts = np.bincount(state.labels[state.stages == stage], minlength=4)
        possible = law > 0
        assert counts[~possible].sum() == 0
        if possible.sum() > 1:
            assert stats.chisquare(counts[possible], 10_000 * law[possible]).pvalue > ALPHA
    first = np.bincount(state.labels[:10_000], minlength=4)
    assert stats.chisquare(first, 10_000 * RandomizedResponse(4, 1.3).law()[2]).pvalue < ALPHA


def test_the_filter_is_for_earlier_stages_with_the_mean_subset_of_the_newest_rounded_down() -> None:
    labels, sizes = np.array([3, 2, 1, -1, 2, 0]), np.array([1, 4, 4, -1, 3, 4])
    state = MultiStage(RandomizedResponseWithPrior(4, 1.0), np.array(STAGES), labels, sizes, stage=2)
    assert state.filter_size == 2  # of 1 and 3, the newest stage's; the mean of all is 3.2
    assert state.queried.tolist() == [0, 1, 2, 4, 5]
    examples, outputs = state.training_set()
    assert examples.tolist() == [0, 1, 2, 4, 5]
    assert outputs.tolist() == [3, 2, 1, 2, 0]
    predictions = np.tile([0.4, 0.4, 0.1, 0.1], (5, 1))  # outputs 2 and 3 are unlikely: of examples 0, 1 and 4
    examples, outputs = state.training_set(predictions)
    assert examples.tolist() == [0, 2, 4, 5]  # but 0 and 4 are of the newest stage
    assert outputs.tolist() == [3, 1, 2, 0]


def test_a_filter_size_of_one_and_a_mean_just_below_two() -> None:
    state = MultiStage.start(RandomizedResponseWithPrior(2, 1.0), [0, 0, 0])
    state = state.query([0, 1, 1], [[0.5, 0.5], [0.5, 0.5], [0.99, 0.01]], rng=rng.seeded(1))
    assert state.subset_sizes.tolist() == [2, 2, 1]
    assert state.filter_size == 1


def test_all_stages_together_cost_epsilon_once() -> None:
    state = MultiStage.start(RandomizedResponseWithPrior(4, 1.5), STAGES)
    events = [state.event(stage) for stage in range(3)]
    assert [event.examples for event in events] == [3, 2, 1]
    price = label_price(events)
    assert price is not None
    assert (price.epsilon, price.delta, price.releases) == (1.5, 0.0, 3)
    assert state.privacy_loss() == 1.5
    again = label_price([*events, events[1]])
    assert again is not None
    assert again.epsilon == 3.0  # a stage that is queried twice is paid for twice
    other = MultiStage.start(RandomizedResponseWithPrior(4, 1.5), STAGES[::-1])
    assert other.partition != state.partition
    mixed = label_price([*events, other.event(0)])
    assert mixed is not None
    assert mixed.epsilon == 3.0  # parts of another division may overlap


def test_random_stages_have_their_shares_and_are_uniform(source: NoiseSource) -> None:
    stages = random_stages(1001, [0.6, 0.3, 0.1], rng=source)
    assert np.bincount(stages).tolist() == [601, 300, 100]
    found = np.stack([random_stages(10, [0.5, 0.5], rng=source) for _ in range(2000)])
    assert stats.chisquare(found.sum(axis=0)).pvalue > ALPHA
    assert len({tuple(row) for row in found}) > 200  # of the 252 divisions


G = rng.seeded(1)
START = MultiStage.start(CERTAIN, STAGES)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: MultiStage.start(CERTAIN, [0, 2]), "stages from 0 to 1, found 2"),
        (lambda: MultiStage.start(CERTAIN, [0, 2, 2]), "an example in each, found an empty one"),
        (lambda: MultiStage.start(CERTAIN, []), "an example in each, found an empty one"),
        (lambda: START.query([0, 1], None, rng=G), "the 3 labels of stage 0, found 2"),
        (lambda: START.query([0, 1, 4], None, rng=G), "labels from 0 to 3, found 4"),
        (lambda: START.query([0, 1, 2], np.ones((2, 4)), rng=G), "each of 3 examples, found 2"),
        (lambda: START.filter_size, "a stage that is queried, found none yet"),
        (lambda: START.event(3), "stage from 0 to 2, found 3"),
        (lambda: START.event(-1), "stage .* found -1"),
        (lambda: random_stages(0, [1.0], rng=G), "examples .* found 0"),
        (lambda: random_stages(9, [0.5, 0.6], rng=G), r"sum to 1, found \[0.5, 0.6\]"),
        (lambda: random_stages(9, [1.5, -0.5], rng=G), r"shares above 0 that sum to 1, found \[1.5, -0.5\]"),
        (lambda: random_stages(9, [0.5, math.nan], rng=G), "shares above 0 that sum to 1"),
        (lambda: random_stages(3, [0.9, 0.1], rng=G), r"every stage, found sizes \[3, 0\]"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
