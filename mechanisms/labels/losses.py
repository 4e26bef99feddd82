"""What a learner minimizes on randomized labels: each loss as weights over the classes, l̃ = Σ_z w_z·l(x, z).

Every function gives weights (n, K) for n examples, to be called on a batch; any learner whose loss is a sum over
examples can use them, and its gradient is the same sum over the gradients. A loss with the weights is an unbiased
estimate of the loss on the true label where a docstring says so. Weights may be negative, so that a weighted log-loss
can be unbounded from below: regularise. All of it is post-processing and costs no privacy.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.mechanisms.arguments import expect_count, expect_positive
from coterie.mechanisms.labels.arguments import Array, expect_groups, expect_labels, expect_priors
from coterie.mechanisms.labels.randomized_response import top_k


def debiased_weights(labels: ArrayLike, *, classes: int, epsilon: float) -> Array:
    """For K-ary randomized response: w = (e_ỹ − p·1)/(1 − K p) with p = 1/(e^ε + K − 1).

    E[w | y] = e_y, so the loss is unbiased given the true label y. Its gradient is the one of LP-RR-SGD (arXiv
    2102.06062, Algorithm 5; its formula is not in the text we have and is derived): 1/(1 − K p) =
    (e^ε + K − 1)/(e^ε − 1), that is ĝ = (e^ε + K − 1)/(e^ε − 1)·(∇l(ỹ) − p·Σ_z ∇l(z)).

    Raises ``ValueError`` for a label outside 0 … K − 1, K < 2 and ε ≤ 0 or not finite.
    """
    expect_count("classes", classes, least=2)
    return _debiased(labels, np.ones((1, classes), bool), epsilon)


def subset_debiased_weights(labels: ArrayLike, subsets: NDArray[np.bool_], *, epsilon: float) -> Array:
    """For RRTop-k and RRWithPrior: w = (e_ỹ − p·1_{Y_k})/(1 − k p) with p = 1/(e^ε + k − 1).

    ``labels`` are the outputs ỹ; ``subsets`` (n, K) says which labels are in each example's Y_k, as
    ``randomized_response.top_k(priors, subset_sizes)`` does. Unbiased given a true label y in Y_k; for y outside, the
    expectation is the mean of the losses over Y_k. For k = 1 it is the loss of ỹ. Source: arXiv 2102.06062,
    Appendix G.

    Raises ``ValueError`` for an output that is not in its subset, an empty subset and ε ≤ 0 or not finite.
    """
    members = np.asarray(subsets)
    if members.dtype != np.bool_ or members.ndim != 2 or len(members) != np.size(labels):
        raise ValueError(f"Expected subsets of truth values, a row per example, found {members.dtype} {members.shape}")
    return _debiased(labels, members, epsilon)


def cluster_weights(labels: ArrayLike, distributions: ArrayLike, clusters: ArrayLike, *, correction: float) -> Array:
    """For ``ClusterResponse``: w = (e_ỹ − β·q̃_c)/(1 − β), with ``correction`` β and q̃ ``distributions`` (C, K).

    β = λ makes it unbiased: E[w | y] = e_y, as resampling is the matrix (1 − λ)I + λ·1q̃ᵀ. β = 0 is the plain loss on
    the output: less variance, and biased towards the cluster's labels. Source: arXiv 2110.02159, Algorithm 1; the
    formula is derived.

    Raises ``ValueError`` for labels, distributions or clusters that do not fit, and β outside [0, 1).
    """
    if not 0 <= correction < 1:
        raise ValueError(f"Expected correction from 0 to below 1, found {correction}")
    table = np.atleast_2d(np.asarray(distributions, np.float64))
    expect_priors("distributions", table, table.shape[-1])
    values = expect_labels("labels", labels, table.shape[1])
    members = expect_groups("clusters", clusters, values.size, len(table))
    weights = -correction * table[members]
    weights[np.arange(values.size), values] += 1.0
    weights /= 1 - correction
    return weights


def filtered_weights(labels: ArrayLike, predictions: ArrayLike, k: int) -> Array:
    """The plain loss on the output, e_ỹ, without the examples whose output a model finds unlikely: their w is 0.

    ``predictions`` (n, K) are the model's probabilities or logits; ỹ is unlikely if it is not among the ``k`` largest.
    LP-MST uses the newest model and k = ``multistage.filter_size``. Raises ``ValueError`` for shapes that do not fit,
    predictions that are not finite, and k outside 1 … K.
    """
    outputs = np.asarray(predictions, np.float64)
    if outputs.ndim != 2 or len(outputs) != np.size(labels) or not np.isfinite(outputs).all():
        raise ValueError(f"Expected finite predictions (n, K) for {np.size(labels)} labels, found {outputs.shape}")
    classes = outputs.shape[1]
    expect_count("k", k)
    if k > classes:
        raise ValueError(f"Expected k from 1 to {classes}, found {k}")
    values = expect_labels("labels", labels, classes)
    likely = top_k(outputs, k)
    weights = np.zeros(outputs.shape)
    each = np.arange(values.size)
    weights[each, values] = likely[each, values]
    return weights


def _debiased(labels: ArrayLike, members: NDArray[np.bool_], epsilon: float) -> Array:
    expect_positive("epsilon", epsilon)
    values = expect_labels("labels", labels, members.shape[1])
    shape = (values.size, members.shape[1])
    sizes = members.sum(axis=1, keepdims=True)
    each = np.arange(values.size)
    if not np.broadcast_to(members, shape)[each, values].all():
        raise ValueError("Expected every label to be in its subset, found one outside")
    # Numerator and denominator over e^ε, so that a large ε does not overflow and a small one does not cancel.
    weights = np.where(members, -math.exp(-epsilon), 0.0) * np.ones(shape)
    weights[each, values] += 1 + (sizes[:, 0] - 1) * math.exp(-epsilon)
    weights /= -math.expm1(-epsilon)
    return weights
