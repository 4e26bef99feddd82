"""A plan applied to private labels: the noisy ones, what a learner minimizes on them, and what is promised."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError
from coterie.labels.plan import Groups, Mechanism, Plan
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.arguments import Array, Integers
from coterie.mechanisms.labels.clustering import ClusterResponse, expect_clusters
from coterie.mechanisms.labels.peer_to_peer import PeerToPeer, smallest_flip_probability
from coterie.mechanisms.labels.randomized_response import (
    CELLS,
    RandomizedResponse,
    RandomizedResponseWithPrior,
    Responses,
    TopKRandomizedResponse,
    top_k,
)
from coterie.mechanisms.randomness import NoiseSource
from coterie.rounding import rounded_up

LARGEST_PEER_CLUSTER = 1000
"""Exact accounting for peers takes time that grows as the cube of the cluster: half a second for this many."""


@dataclass(frozen=True)
class Sanitized:
    """Noisy ``labels`` (n,) as class numbers, the ``event`` to account for, and the loss.

    ``loss`` and ``arrays`` are the loss specification, which ``weights.class_weights`` reads. Everything in here may
    be shown. ``notes`` are sentences about this mechanism's guarantee.
    """

    labels: Integers
    event: LabelRelease
    loss: dict[str, Any]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def sanitize(
    plan: Plan, labels: Integers, groups: Groups | None, prior: Array | None, *, rng: NoiseSource
) -> Sanitized:
    """Randomize ``labels`` (n,), class numbers, once. ``prior`` is needed by the mechanisms that have one.

    Raises ``CoterieError`` for a plan that does not fit the rows, and ``ValueError`` for numbers out of range; neither
    names a label.
    """
    match plan.mechanism:
        case Mechanism.RR:
            return _plain(plan, labels, rng)
        case Mechanism.UNIFORM_RR:
            response = ClusterResponse.uniform(plan.epsilon, classes=plan.alphabet.classes)
            return _clustered(plan, response, labels, Groups(np.zeros(labels.size, np.int64), 1), rng)
        case Mechanism.CLUSTER_RR:
            floor = plan.floor or 0.0
            response = ClusterResponse.for_epsilon(plan.epsilon, classes=plan.alphabet.classes, floor=floor)
            return _clustered(plan, response, labels, _needed(groups), rng)
        case Mechanism.P2P:
            return _peers(plan, labels, _needed(groups), rng)
        case _:
            return _with_prior(plan, labels, groups, np.ones(plan.alphabet.classes) if prior is None else prior, rng)


def _plain(plan: Plan, labels: Integers, rng: NoiseSource) -> Sanitized:
    response = RandomizedResponse(plan.alphabet.classes, plan.epsilon)
    loss = {
        "kind": "debiased",
        "weights": "w_z = (1[z = label] - p)/(1 - K p), with p = 1/(e^epsilon + K - 1)",
        "unbiased": "given the true label",
        "epsilon": plan.epsilon,
        "keep_probability": response.keep_probability,
    }
    return Sanitized(response(labels, rng=rng), response.event(labels.size), loss)


def _with_prior(plan: Plan, labels: Integers, groups: Groups | None, prior: Array, rng: NoiseSource) -> Sanitized:
    classes = plan.alphabet.classes
    members = None if groups is None else groups.members
    found: Responses
    if plan.mechanism is Mechanism.RR_TOP_K:
        top = TopKRandomizedResponse(classes, plan.epsilon)
        found, event = top(labels, prior, plan.k or 0, rng=rng, groups=members), top.event(labels.size)
    else:
        best = RandomizedResponseWithPrior(classes, plan.epsilon)
        found, event = best(labels, prior, rng=rng, groups=members), best.event(labels.size)
    table = prior.reshape(-1, classes)
    own = np.arange(labels.size) if len(table) > 1 else np.zeros(labels.size, np.int64)
    own = own if members is None else members
    sizes = np.ones(len(table), np.int64)  # of a group without rows: nobody asks
    sizes[own] = found.subset_sizes
    loss = {
        "kind": "subset",
        "weights": "w_z = (1[z = label] - p)/(1 - k p) for z in the row's subset and 0 elsewhere, with k the subset's "
        "size and p = 1/(e^epsilon + k - 1)",
        "unbiased": "given a true label in the subset; for another one the expectation is the mean over the subset",
        "epsilon": plan.epsilon,
        "arrays": {"subsets": "(groups, K): whether a label is in the subset", "groups": "(n,): the row's group"},
        "mean_subset_size": float(found.subset_sizes.mean()) if labels.size else None,
    }
    note = (
        "The prior must come from public knowledge or from other people's labels. One that was made from these very "
        "labels voids the guarantee, and coterie cannot notice."
    )
    subsets = np.empty(table.shape, np.bool_)
    step = max(1, CELLS // classes)
    for start in range(0, len(table), step):
        subsets[start : start + step] = top_k(table[start : start + step], sizes[start : start + step])
    arrays = {"subsets": subsets, "groups": own}
    return Sanitized(found.labels, event, loss, arrays, (note,))


def _clustered(plan: Plan, response: ClusterResponse, labels: Integers, groups: Groups, rng: NoiseSource) -> Sanitized:
    members = _expect_clusters(groups, labels.size, plan)
    found = response(labels, members, cluster_count=groups.count, rng=rng)
    loss = {
        "kind": "cluster",
        "weights": "w_z = (1[z = label] - beta q_z)/(1 - beta), with q the distribution of the row's cluster",
        "unbiased": "given the true label with beta = resampling; beta = 0 has less variance and is biased towards the "
        "cluster's labels",
        "beta": response.resampling,
        "resampling": response.resampling,
        "floor": response.floor,
        "histogram_noise_scale": response.noise_scale if math.isfinite(response.noise_scale) else None,
        "arrays": {"distributions": "(clusters, K): q", "clusters": "(n,): the row's cluster"},
    }
    arrays = {"distributions": found.distributions, "clusters": members}
    note = "Clusters must be formed without the labels." if plan.mechanism is Mechanism.CLUSTER_RR else None
    return Sanitized(found.labels, response.event(labels.size), loss, arrays, (note,) if note else ())


def _peers(plan: Plan, labels: Integers, groups: Groups, rng: NoiseSource) -> Sanitized:
    members = _expect_clusters(groups, labels.size, plan)
    sizes = np.unique(np.bincount(members, minlength=groups.count))
    sizes = sizes[sizes > 0]
    flip, delta = flip_probability(plan.epsilon, plan.delta, [int(size) for size in sizes])
    peers = PeerToPeer(flip)
    event = LabelRelease("peer-to-peer", labels.size, plan.epsilon, delta)
    loss = {
        "kind": "flip",
        "weights": "w_z = (1[z = label] - p)/(1 - 2 p)",
        "unbiased": "given the true labels of the row's cluster: the expectation is the mean loss over their shares, "
        "as a row reports a random peer's label",
        "flip_probability": flip,
        "arrays": {"clusters": "(n,): the row's cluster"},
    }
    notes = (
        f"Each label is flipped with probability {flip:.6g} and given to a random row of its cluster; who asked whom "
        "is not kept. Clusters must be formed without the labels.",
        "Somebody who learns who asked whom, or who shares a cluster and tells all it knows, is held off by the flip "
        f"only: ε = {rounded_up(peers.local_loss, 6)} there.",
    )
    released = peers(labels, members, cluster_count=groups.count, rng=rng)
    return Sanitized(released, event, loss, {"clusters": members}, notes)


def flip_probability(epsilon: float, delta: float | None, sizes: list[int]) -> tuple[float, float]:
    """p for clusters of all ``sizes``, and the δ that they have together at ``epsilon``.

    The target δ is 1/s² for the smallest s unless one is given. p is found for the smallest cluster, then raised for
    every other one that needs more.
    """
    ordered = sorted(sizes)
    if not ordered:
        raise CoterieError("Expected rows in the table, found none")
    if ordered[-1] > LARGEST_PEER_CLUSTER:
        raise CoterieError(
            f"Expected clusters of at most {LARGEST_PEER_CLUSTER} rows with p2p, found one of {ordered[-1]}: make more"
        )
    target = 1 / ordered[0] ** 2 if delta is None else delta
    flip, worst = smallest_flip_probability(epsilon=epsilon, delta=target, size=ordered[0]), 0.0
    for size in ordered:
        if PeerToPeer(flip).delta(epsilon, size=size) > target:
            flip = smallest_flip_probability(epsilon=epsilon, delta=target, size=size)
    for size in ordered:
        worst = max(worst, PeerToPeer(flip).delta(epsilon, size=size))
    return flip, worst


def guarantee(plan: Plan, sanitized: Sanitized, *, column: str) -> tuple[str, ...]:
    """What the release promises and what it does not, in sentences for whoever gets the table."""
    event = sanitized.event
    pure = "" if event.delta else f": no answer gets more than e^ε = {_factor(event.epsilon)} times likelier"
    delta = f", δ = {rounded_up(event.delta, 6)}" if event.delta else ""
    clusters = "" if plan.group is None and not plan.features else ", which group or cluster a row is in"
    return (
        f"Protected: the label of any one row, with label differential privacy ε = {rounded_up(event.epsilon, 6)}"
        f"{delta}. Two tables with equal features that differ in one row's {column!r} give the noisy labels and the "
        f"loss specification with nearly equal probabilities{pure}.",
        "Not protected: all other columns, the number and the order of the rows, the list of possible labels"
        f"{clusters}, and what the features alone tell about the label.",
        "For a person with m rows ε is m times as large, and for labels that depend on each other likewise.",
        "Reading, copying and training on the noisy labels is free. Randomizing the same labels again is a second "
        "release: the ε of both add up.",
        *sanitized.notes,
    )


def _factor(epsilon: float) -> str:
    return rounded_up(math.exp(epsilon), 6) if epsilon < 600 else "more than 1e260"


def _needed(groups: Groups | None) -> Groups:
    if groups is None:
        raise CoterieError("Expected --group, or --features and --clusters, found none of them")
    return groups


def _expect_clusters(groups: Groups, rows: int, plan: Plan) -> Integers:
    try:
        return expect_clusters(groups.members, rows, groups.count)
    except ValueError as error:
        advice = "use fewer --clusters" if plan.features else "merge it with another"
        single = np.bincount(groups.members, minlength=groups.count) == 1
        if not single.any():
            raise
        name = f", {groups.names[int(np.argmax(single))]!r}" if groups.names else ""
        raise CoterieError(f"Expected 2 rows or more in every cluster, found one of 1{name}: {advice}") from error
