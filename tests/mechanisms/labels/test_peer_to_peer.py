"""Peers: the law of the count in exact fractions, δ in both directions over all a, and the protocol's own output."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from coterie import rng
from coterie.mechanisms.labels.peer_to_peer import PeerToPeer, smallest_flip_probability
from coterie.mechanisms.randomness import NoiseSource

ALPHA = 1e-9


def exact_laws(p: Fraction, size: int, ones: int) -> tuple[list[Fraction], list[Fraction]]:
    """P(N) for y_j = 0 and 1 in rational numbers, by sums over the flips: nothing of the module is used."""

    def binomial(count: int, q: Fraction, hits: int) -> Fraction:
        return math.comb(count, hits) * q**hits * (1 - q) ** (count - hits)

    others = [
        sum(binomial(ones, 1 - p, i) * binomial(size - 1 - ones, p, m - i) for i in range(m + 1) if m - i <= size)
        for m in range(size)
    ]

    def law(one: Fraction) -> list[Fraction]:
        total = [
            one * (others[m - 1] if m else 0) + (1 - one) * (others[m] if m < size else 0) for m in range(size + 1)
        ]
        return [sum(total[m] * binomial(size, Fraction(m, size), n) for m in range(size + 1)) for n in range(size + 1)]

    return law(p), law(1 - p)


def exact_delta(p: Fraction, size: int, epsilon: float, all_ones: range) -> float:
    factor = Fraction(math.exp(epsilon))
    found = []
    for ones in all_ones:
        zero, one = exact_laws(p, size, ones)
        found += [sum(max(a - factor * b, 0) for a, b in zip(x, y, strict=True)) for x, y in ((zero, one), (one, zero))]
    return float(max(found))


def test_golden_vectors_of_two_peers() -> None:
    peers = PeerToPeer(0.25)
    assert peers.law(0, size=2, ones=1) == pytest.approx([0.34375, 0.3125, 0.34375], abs=1e-12)
    assert peers.law(1, size=2, ones=1) == pytest.approx([0.15625, 0.1875, 0.65625], abs=1e-12)
    assert peers.pure_loss(size=2) == pytest.approx(0.788457, abs=6e-7)
    assert peers.delta(0.5, size=2) == pytest.approx(0.0895021, abs=6e-8)
    assert peers.local_loss == pytest.approx(math.log(3), rel=1e-15)


@pytest.mark.parametrize("size", [2, 5, 9])
@pytest.mark.parametrize("flip", [Fraction(1, 4), Fraction(1, 64), Fraction(1, 2)])
def test_laws_and_delta_are_those_of_rational_arithmetic(size: int, flip: Fraction) -> None:
    peers = PeerToPeer(float(flip))
    losses = []
    for ones in range(size):
        for label, exact in enumerate(exact_laws(flip, size, ones)):
            assert peers.law(label, size=size, ones=ones) == pytest.approx([float(x) for x in exact], rel=1e-11)
        losses += [abs(math.log(a / b)) for a, b in zip(*exact_laws(flip, size, ones), strict=True)]
    assert peers.pure_loss(size=size) == pytest.approx(max(losses), abs=1e-11)
    assert peers.pure_loss(size=size) <= peers.local_loss + 1e-11
    for epsilon in (0.0, 0.3, 1.0):
        exact_value = exact_delta(flip, size, epsilon, range(size))
        assert peers.delta(epsilon, size=size) == pytest.approx(exact_value, rel=1e-9, abs=1e-12)
        assert peers.delta(epsilon, size=size) >= exact_value * (1 - 1e-15)
    assert peers.delta(peers.pure_loss(size=size), size=size) < 1e-12


# papers.md (b): cluster size, ε, smallest p for δ = 1/s², there rounded up from a coarse search.
GOLDEN = [
    (50, 0.5, 0.17893),
    (50, 1.0, 0.03568),
    (100, 0.5, 0.14228),
    (100, 1.0, 0.02344),
    (200, 0.5, 0.10414),
    (200, 1.0, 0.01465),
    (400, 0.5, 0.07061),
    (400, 1.0, 0.00883),
]


@pytest.mark.parametrize(("size", "epsilon", "flip"), GOLDEN)
def test_golden_flip_probabilities_meet_their_target_and_hardly_more(size: int, epsilon: float, flip: float) -> None:
    assert PeerToPeer(flip * 1.0001).delta(epsilon, size=size) <= size**-2
    assert PeerToPeer(flip * 0.995).delta(epsilon, size=size) > size**-2


@pytest.mark.parametrize(("size", "epsilon", "flip"), GOLDEN[:2])
def test_the_smallest_flip_probability(size: int, epsilon: float, flip: float) -> None:
    found = smallest_flip_probability(epsilon=epsilon, delta=size**-2, size=size)
    assert found == pytest.approx(flip, rel=2e-3)
    assert PeerToPeer(found).delta(epsilon, size=size) <= size**-2
    # a = 0 is the worst case here, in exact arithmetic, to which the returned p is the smallest.
    near = Fraction(found).limit_denominator(10**8)
    assert exact_delta(near, size, epsilon, range(1)) * size**2 == pytest.approx(1.0, abs=1e-4)


def test_any_flip_probability_above_the_smallest_meets_the_target() -> None:
    """What bisection relies on, on a grid."""
    deltas = [PeerToPeer(float(p)).delta(0.5, size=30) for p in np.linspace(0.001, 0.5, 120)]
    assert (np.diff(deltas) <= 1e-15).all()
    assert deltas[-1] < 1e-12


def test_the_number_of_ones_has_its_law(source: NoiseSource) -> None:
    peers = PeerToPeer(0.1)
    size, clusters = 6, 4_000
    labels = np.tile([1, 0, 1, 0, 0, 0], clusters)
    members = np.repeat(np.arange(clusters), size)
    outputs = peers(labels, members, cluster_count=clusters, rng=source)
    counts = np.bincount(outputs.reshape(clusters, size).sum(axis=1), minlength=size + 1)
    assert set(outputs) == {0, 1}

    def p_value(flip: float, ones: int) -> float:
        law = PeerToPeer(flip).law(0, size=size, ones=ones)
        return float(stats.chisquare(counts, clusters * law).pvalue)

    assert p_value(0.1, 2) > ALPHA
    assert p_value(0.2, 2) < ALPHA
    assert p_value(0.03, 2) < ALPHA
    assert p_value(0.1, 3) < ALPHA
    # Given M all peers' outputs are alike: each one is a draw with replacement.
    ones = outputs.reshape(clusters, size).sum(axis=0)
    assert stats.chisquare(ones).pvalue > ALPHA


def test_nobody_is_asked_in_another_cluster() -> None:
    labels = np.repeat([0, 1, 0], [3, 4, 2])
    outputs = PeerToPeer(1e-12)(labels, np.repeat([2, 0, 5], [3, 4, 2]), cluster_count=6, rng=rng.seeded(1))
    assert np.array_equal(outputs, labels)


def test_the_record_of_an_exchange_is_that_of_the_worst_cluster() -> None:
    peers = PeerToPeer(0.2)
    record = peers.event(0.5, [5, 0, 20, 5])
    assert (record.mechanism, record.examples, record.epsilon) == ("peer-to-peer", 30, 0.5)
    assert record.delta == peers.delta(0.5, size=5) > peers.delta(0.5, size=20)


G = rng.seeded(1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: PeerToPeer(0.0), "flip_probability above 0 and at most 1/2, found 0.0"),
        (lambda: PeerToPeer(0.6), "flip_probability above 0 and at most 1/2, found 0.6"),
        (lambda: PeerToPeer(math.nan), "flip_probability above 0 and at most 1/2, found nan"),
        (lambda: PeerToPeer(0.1)([0, 2], [0, 0], cluster_count=1, rng=G), "labels from 0 to 1, found 2"),
        (lambda: PeerToPeer(0.1)([0, 1], [0, 1], cluster_count=2, rng=G), "2 examples or more, found one of 1"),
        (lambda: PeerToPeer(0.1).delta(0.5, size=1), "size .* found 1"),
        (lambda: PeerToPeer(0.1).delta(-0.5, size=3), "epsilon >= 0, found -0.5"),
        (lambda: PeerToPeer(0.1).event(0.5, [3, 1]), "size .* found 1"),
        (lambda: PeerToPeer(0.1).law(2, size=3, ones=0), "label from 0 to 1, found 2"),
        (lambda: PeerToPeer(0.1).law(1, size=3, ones=3), "ones from 0 to 2, found 3"),
        (lambda: PeerToPeer(0.01).pure_loss(size=200), r"size \* ln\(1/p\) <= 700.0, found size 200"),
        (lambda: smallest_flip_probability(epsilon=1.0, delta=0.0, size=3), "delta above 0 and below 1, found 0.0"),
        (lambda: smallest_flip_probability(epsilon=1.0, delta=0.1, size=1), "size .* found 1"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
