"""The secure generator's numbers and secrecy, and the seed tree."""

import copy
import math
import os
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from coterie import rng

ALPHA = 1e-9


class ReplayedEntropy(rng.SecureGenerator):
    """The secure generator on keys that repeat: what only a test may have."""

    __slots__ = ("_keys",)

    def __init__(self, seed: int) -> None:
        self._keys = np.random.default_rng(seed)

    def _entropy(self, count: int) -> bytes:
        return self._keys.bytes(count)


@pytest.mark.parametrize(("dtype", "integer", "tolerance"), [(np.float64, "<i8", 1e-12), (np.float32, "<i4", 2e-6)])
@pytest.mark.parametrize("size", [1, 2, 7, 10])
def test_normals_are_box_muller_of_the_aes_key_stream(dtype: type, integer: str, tolerance: float, size: int) -> None:
    found = ReplayedEntropy(4).standard_normal(size, dtype)
    pairs = (size + 1) // 2
    key = np.random.default_rng(4).bytes(32)
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    stream = encryptor.update(bytes(16 * pairs))
    radius_bits = np.frombuffer(stream, "<i8", pairs)
    angle_bits = np.frombuffer(stream, integer, pairs, offset=8 * pairs)
    half_turn = 2 ** (8 * np.dtype(dtype).itemsize - 1)
    expected = np.empty(2 * pairs)
    for i in range(pairs):
        radius = math.sqrt(-2 * math.log((abs(int(radius_bits[i])) + 0.5) / 2**63))
        angle = math.pi * int(angle_bits[i]) / half_turn
        expected[i], expected[pairs + i] = radius * math.cos(angle), radius * math.sin(angle)
    assert found.dtype == dtype
    assert found == pytest.approx(expected[:size], abs=tolerance)


def normal_p_values(numbers: np.ndarray) -> list[float]:
    """Kolmogorov-Smirnov; chi-square of the far tails; and of squares, which shows the scale; and of neighbours."""
    numbers = numbers.astype(np.float64)
    edges = np.array([-np.inf, -4.0, -3.5, -3.0, 3.0, 3.5, 4.0, np.inf])
    counts = np.histogram(numbers, np.clip(edges, -100, 100))[0]
    expected = numbers.size * np.diff(stats.norm.cdf(edges))
    energy, law = float((numbers**2).sum()), stats.chi2(numbers.size)
    # The halves hold the two members of each pair: for independent normals their product has variance 1.
    halves = numbers[: numbers.size // 2], numbers[numbers.size // 2 :]
    together = [float((a * b).sum() / math.sqrt(a.size)) for a, b in [halves, (numbers[:-1], numbers[1:])]]
    return [
        float(stats.kstest(numbers, stats.norm.cdf).pvalue),
        float(stats.chisquare(counts, expected).pvalue),
        2 * min(float(law.cdf(energy)), float(law.sf(energy))),
        *(2 * float(stats.norm.sf(abs(z))) for z in together),
    ]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_normals_have_their_law(dtype: type) -> None:
    numbers = ReplayedEntropy(5).standard_normal(1_000_000, dtype)
    # One chunk is 2·16384 numbers, pairs half a chunk apart.
    pairs = numbers[: 30 * 32768].reshape(30, 2, 16384)
    assert min(normal_p_values(numbers)) > ALPHA
    assert min(normal_p_values(np.concatenate([pairs[:, 0].ravel(), pairs[:, 1].ravel()]))) > ALPHA


def test_wrong_normals_are_rejected() -> None:
    numbers = np.random.default_rng(1).standard_normal(300_000)
    assert min(normal_p_values(numbers * 1.02)) < ALPHA
    assert min(normal_p_values(np.clip(numbers, -3.4, 3.4))) < ALPHA
    assert min(normal_p_values(np.concatenate([numbers[:150_000]] * 2))) < ALPHA
    assert min(normal_p_values(np.random.default_rng(1).standard_t(20, 300_000))) < ALPHA


@pytest.mark.parametrize("extreme", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize(("dtype", "angle"), [(np.float64, np.int64), (np.float32, np.int32)])
def test_no_bits_give_a_non_finite_normal_and_the_tail_is_as_documented(
    extreme: int, dtype: type, angle: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        """A key stream of chosen radii at the corners of the angle."""

        def update_into(self, data: memoryview, out: memoryview) -> None:
            radii = np.full(5, extreme, np.int64)
            limits = np.iinfo(angle)
            angles = np.array([0, 1, -1, limits.min, limits.max], angle)
            out[: len(data)] = radii.tobytes() + angles.tobytes()

    class Factory:
        def __init__(self, *_: object) -> None:
            pass

        def encryptor(self) -> Stream:
            return Stream()

    monkeypatch.setattr(rng, "Cipher", Factory)
    numbers = rng.secure().standard_normal(10, dtype)
    assert np.isfinite(numbers).all()
    largest = math.sqrt(2 * 64 * math.log(2))
    assert np.abs(numbers).max() <= largest * (1 + 1e-6)
    if extreme == 0:
        assert np.abs(numbers).max() == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("shape", [1.0, 1.5, 2.0, 11.0, 1e6])
def test_gamma_has_its_law_and_another_shape_is_rejected(shape: float) -> None:
    generator = ReplayedEntropy(6)
    numbers = np.array([generator.standard_gamma(shape) for _ in range(10_000)])
    assert stats.kstest(numbers, stats.gamma(shape).cdf).pvalue > ALPHA
    for wrong in (shape + 0.5 * math.sqrt(shape), shape - 0.3 * math.sqrt(shape)):
        assert stats.kstest(numbers, stats.gamma(wrong).cdf).pvalue < ALPHA


def test_uniforms_have_their_law() -> None:
    generator = ReplayedEntropy(7)
    numbers = np.array([generator.random() for _ in range(100_000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers, stats.uniform.cdf).pvalue > ALPHA
    assert stats.kstest(numbers**1.1, stats.uniform.cdf).pvalue < ALPHA
    assert np.array_equal(numbers * 2.0**53, np.rint(numbers * 2.0**53))


@pytest.mark.parametrize("size", [1, 2, 5, 32_768, 32_769, 70_001])
def test_arrays_of_uniforms_are_the_upper_bits_of_the_aes_key_stream(size: int) -> None:
    key = np.random.default_rng(8).bytes(32)
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * size))
    expected = (np.frombuffer(stream, "<u8") >> 11) / 2.0**53
    assert np.array_equal(ReplayedEntropy(8).random(size), expected)


def test_arrays_of_uniforms_have_their_law() -> None:
    generator = ReplayedEntropy(9)
    numbers = generator.random(100_000)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers, stats.uniform.cdf).pvalue > ALPHA
    assert stats.kstest(numbers**1.1, stats.uniform.cdf).pvalue < ALPHA
    assert not np.array_equal(generator.random(4), generator.random(4))  # a fresh key for every array
    assert generator.random(()).shape == ()
    assert generator.random(0).shape == (0,)
    assert generator.random((2, 3)).shape == (2, 3)


def test_the_entropy_is_the_operating_system_s_and_fresh_for_every_array(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def urandom(count: int) -> bytes:
        asked.append(count)
        return bytes(count)

    monkeypatch.setattr(os, "urandom", urandom)
    generator = rng.secure()
    assert np.array_equal(generator.standard_normal(3), generator.standard_normal(3))
    assert np.array_equal(generator.random(3), generator.random(3))
    assert asked == [32, 32, 32, 32]
    assert generator.random() == 0


def test_two_streams_differ() -> None:
    one, other = rng.secure(), rng.secure()
    draws = [one.standard_normal(4), one.standard_normal(4), other.standard_normal(4)]
    assert len({draw.tobytes() for draw in draws}) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform cannot fork")
def test_a_forked_child_does_not_repeat_its_parent() -> None:
    generator = rng.secure()
    generator.standard_normal(3)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.write(write, generator.standard_normal(3).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 24)
    os.close(read)
    os.close(write)
    assert len(theirs) == 24
    assert theirs != generator.standard_normal(3).tobytes()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="no copy or pickle"):
        duplicate(rng.secure())


def test_shapes_are_as_numpy_s() -> None:
    generator = rng.secure()
    assert isinstance(generator.standard_normal(), float)
    assert generator.standard_normal(()).shape == ()
    assert generator.standard_normal(0).shape == (0,)
    assert generator.standard_normal((2, 3), np.float32).shape == (2, 3)
    target = np.zeros((3, 5))
    assert generator.standard_normal(out=target) is target
    assert np.all(target != 0)
    part = np.zeros(10)
    generator.standard_normal(out=part[2:7])
    assert np.all(part[2:7] != 0)
    assert not part[:2].any()
    assert not part[7:].any()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda g: g.standard_normal(3, np.int64), "dtype float64 or float32, found int64"),
        (lambda g: g.standard_normal(out=np.zeros(3, np.float32)), "out to be C-contiguous float64"),
        (lambda g: g.standard_normal(out=np.zeros((3, 2))[:, 0]), "out to be C-contiguous float64"),
        (lambda g: g.standard_normal(4, out=np.zeros(3)), "of size 4, found float64"),
        (lambda g: g.standard_gamma(0.5), "shape >= 1 and finite, found 0.5"),
        (lambda g: g.standard_gamma(math.nan), "shape >= 1 and finite, found nan"),
    ],
)
def test_bad_arguments_are_named(act: Callable[[rng.SecureGenerator], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act(rng.secure())


def test_the_seed_tree_is_reproducible_and_its_places_are_apart() -> None:
    places = [(7,), (7, 0), (7, "0"), (7, 0, 0), (8,), (7, "ab", "c"), (7, "a", "bc"), (7, "abc"), (-7,)]
    draws = [rng.seeded(*place).integers(2**63) for place in places]
    assert draws == [rng.seeded(*place).integers(2**63) for place in places]
    assert len(set(draws)) == len(places)


def test_the_seed_tree_takes_numpy_s_integers_as_equal() -> None:
    assert rng.seeded(7, 2**63 + 5).random() == rng.seeded(np.int64(7), np.uint64(2**63 + 5)).random()


def test_the_seed_tree_does_not_cut_fractions_off() -> None:
    with pytest.raises(TypeError, match="float"):
        rng.seeded(7, 1.5)  # type: ignore[arg-type]
