"""Losses as class weights: golden vectors, and unbiased where promised, by the law of the mechanism itself."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.mechanisms.labels.clustering import ClusterResponse
from coterie.mechanisms.labels.losses import (
    cluster_weights,
    debiased_weights,
    filtered_weights,
    subset_debiased_weights,
)
from coterie.mechanisms.labels.randomized_response import RandomizedResponse, TopKRandomizedResponse, top_k

EPSILONS = st.floats(0.01, 30)


def test_golden_vector_of_the_debiased_loss() -> None:
    weights = debiased_weights([0, 1, 2], classes=3, epsilon=1.0)
    assert weights @ [1, 2, 3] == pytest.approx([-0.745930, 2, 4.745930], abs=6e-7)


def test_golden_vector_of_the_cluster_loss() -> None:
    weights = cluster_weights([0, 1, 2], [0.7, 0.2, 0.1], [0, 0, 0], correction=0.6)
    losses = weights @ [0.1, 0.5, 0.9]
    assert losses == pytest.approx([-0.14, 0.86, 1.86], abs=1e-12)
    mechanism = ClusterResponse(3, 0.6, 1.0, 0.05)
    assert mechanism.law([0.7, 0.2, 0.1]) @ losses == pytest.approx([0.1, 0.5, 0.9], abs=1e-12)


@given(st.integers(2, 9), EPSILONS)
def test_the_debiased_loss_is_unbiased_for_randomized_response(classes: int, epsilon: float) -> None:
    weights = debiased_weights(np.arange(classes), classes=classes, epsilon=epsilon)
    assert RandomizedResponse(classes, epsilon).law() @ weights == pytest.approx(np.eye(classes), abs=1e-10)


def test_the_gradient_of_lp_rr_sgd_is_the_debiased_one() -> None:
    """(e^ε + K − 1)/(e^ε − 1)·(∇l(ỹ) − Σ_k ∇l(k)/(e^ε + K − 1)), papers.md (d), on three gradients in R²."""
    gradients = np.array([[1.0, -2.0], [0.5, 4.0], [-3.0, 0.25]])
    power = math.exp(0.8)
    for label in range(3):
        expected = (power + 2) / (power - 1) * (gradients[label] - gradients.sum(axis=0) / (power + 2))
        found = debiased_weights([label], classes=3, epsilon=0.8) @ gradients
        assert found[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_subset_loss_is_unbiased_inside_and_the_mean_outside(k: int) -> None:
    prior = np.array([0.1, 0.4, 0.2, 0.3])
    subset = top_k(prior, k)
    outputs = np.flatnonzero(subset)
    weights = subset_debiased_weights(outputs, np.tile(subset, (k, 1)), epsilon=0.9)
    expected = TopKRandomizedResponse(4, 0.9).law(prior, k)[:, outputs] @ weights
    for label in range(4):
        target = np.eye(4)[label] if subset[label] else subset / k
        assert expected[label] == pytest.approx(target, abs=1e-12)


@given(st.floats(0.01, 0.99), st.lists(st.floats(0.001, 1), min_size=2, max_size=6))
def test_the_cluster_loss_is_unbiased_at_beta_equal_to_lambda(resampling: float, shares: list[float]) -> None:
    q = np.array(shares) / sum(shares)
    classes = len(shares)
    weights = cluster_weights(np.arange(classes), q, np.zeros(classes, int), correction=resampling)
    law = ClusterResponse(classes, resampling, 1.0, 0.5 / classes).law(q)
    assert law @ weights == pytest.approx(np.eye(classes), abs=1e-9)


def test_without_correction_the_cluster_loss_is_plain() -> None:
    assert cluster_weights([1, 0], [[0.5, 0.5]], [0, 0], correction=0.0).tolist() == [[0, 1], [1, 0]]


def test_uniform_clusters_and_randomized_response_have_the_same_loss() -> None:
    uniform = ClusterResponse.uniform(1.0, classes=4)
    weights = cluster_weights([0, 3], [0.25] * 4, [0, 0], correction=uniform.resampling)
    assert weights == pytest.approx(debiased_weights([0, 3], classes=4, epsilon=1.0), rel=1e-12)


def test_each_example_uses_its_own_subset_and_cluster() -> None:
    subsets = np.array([[True, True, False], [False, True, True]])
    weights = subset_debiased_weights([0, 2], subsets, epsilon=1.0)
    assert weights[0, 2] == weights[1, 0] == 0
    assert weights[0, 0] == weights[1, 2] > 1
    weights = cluster_weights([0, 0], [[0.9, 0.1], [0.2, 0.8]], [1, 0], correction=0.5)
    assert weights == pytest.approx(np.array([[(1 - 0.1) / 0.5, -0.4 / 0.5], [(1 - 0.45) / 0.5, -0.05 / 0.5]]))


def test_extreme_epsilons_stay_finite() -> None:
    assert debiased_weights([1], classes=3, epsilon=1e5).tolist() == [[0, 1, 0]]
    tiny = debiased_weights([1], classes=3, epsilon=1e-9)[0]
    assert tiny == pytest.approx([-1e9, 2e9, -1e9], rel=1e-6)
    assert tiny.sum() == pytest.approx(1.0, abs=1e-5)


def test_the_filter_drops_what_the_model_finds_unlikely() -> None:
    predictions = [[3.0, 2.0, 1.0], [0.0, 5.0, 1.0], [1.0, 1.0, 0.0]]
    assert filtered_weights([1, 0, 1], predictions, 2).tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert filtered_weights([1, 0, 1], predictions, 1).sum() == 0  # of a tie the lowest class is the likelier
    assert filtered_weights([1, 0, 1], predictions, 3).sum() == 3


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: debiased_weights([3], classes=3, epsilon=1.0), "labels from 0 to 2, found 3"),
        (lambda: debiased_weights([0], classes=1, epsilon=1.0), "classes .* found 1"),
        (lambda: debiased_weights([0], classes=3, epsilon=0.0), "epsilon > 0 and finite, found 0.0"),
        (
            lambda: subset_debiased_weights([0], np.array([[False, True]]), epsilon=1.0),
            "in its subset, found one outside",
        ),
        (lambda: subset_debiased_weights([0], np.array([[0, 1]]), epsilon=1.0), "subsets of truth values"),
        (lambda: subset_debiased_weights([0, 1], np.array([[True, True]]), epsilon=1.0), "a row per example"),
        (lambda: cluster_weights([0], [0.5, 0.5], [0], correction=1.0), "correction from 0 to below 1, found 1.0"),
        (lambda: cluster_weights([0], [0.5, 0.5], [1], correction=0.5), "clusters from 0 to 0, found 1"),
        (lambda: cluster_weights([0], [0.5, -0.5], [0], correction=0.5), "distributions >= 0 and finite, found -0.5"),
        (lambda: filtered_weights([0], [[1.0, math.nan]], 1), "finite predictions"),
        (lambda: filtered_weights([0, 1], [[1.0, 2.0]], 1), "for 2 labels"),
        (lambda: filtered_weights([0], [[1.0, 2.0]], 3), "k from 1 to 2, found 3"),
        (lambda: filtered_weights([0], [[1.0, 2.0]], 0), "k .* found 0"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
