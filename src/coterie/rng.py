"""Randomness: a cryptographic generator for real noise, and a seed tree for simulation and tests."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from operator import index
from typing import Any, NoReturn, overload

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import DTypeLike, NDArray

_PAIRS = 1 << 14  # pairs of normals made at a time: all buffers together stay within a megabyte of cache
_ZEROS = bytes(16 * _PAIRS)
_BLOCK = 16  # bytes in an AES block


def secure() -> "SecureGenerator":
    """The generator for real noise."""
    return SecureGenerator()


def seeded(seed: int, *path: int | str) -> np.random.Generator:
    """A reproducible generator for the place ``path`` in a run, such as ``seeded(7, "round", 3)``.

    For simulation and tests only: who knows or guesses the seed can subtract the noise. Equal arguments give
    equal streams; different ones, also of different length or type (1 and "1"), independent ones. The seed is
    any integer.
    """
    text = json.dumps([index(seed), *(part if isinstance(part, str) else index(part) for part in path)])
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()))


class SecureGenerator:
    """Random numbers that nobody can predict or replay: a ``NoiseSource`` without a seed.

    Every call that fills an array takes a fresh 256-bit key from the operating system, expands it by AES in
    counter mode, and drops it (without wiping its memory). Nothing is kept between calls, so a forked child,
    another thread or a restored snapshot of the process cannot continue or repeat a stream. Pickling and
    copying are refused all the same: there is no state that could be carried along, and a caller that tries
    expects one.

    What the numbers are made of:

    - ``standard_normal``, float64: Box-Muller from 64 random bits for the radius and 64 for the angle of each
      pair. The smallest uniform is 2⁻⁶⁴, so no number exceeds √(2·64·ln 2) = 9.42 (a true normal does with
      probability 5·10⁻²¹); with 53 bits it would be 8.57, and with 32 bits 6.66.
    - ``standard_normal``, float32: the same 64 bits and tail for the radius, 32 bits for the angle; rounded
      to float32 (24 bits).
    - ``standard_gamma``: Marsaglia and Tsang (2000), an exact rejection method for exact normals and
      uniforms.
    - ``random``: 53 bits, for an array 53 of the 64 that are made for each number.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError("Expected no copy or pickle of a SecureGenerator: call coterie.rng.secure() there")

    @overload
    def random(self, size: None = None) -> float: ...

    @overload
    def random(self, size: int | tuple[int, ...]) -> NDArray[np.float64]: ...

    def random(self, size: int | tuple[int, ...] | None = None) -> float | NDArray[np.float64]:
        """Numbers uniform on [0, 1), multiples of 2⁻⁵³: a float, or an array of shape ``size``."""
        if size is None:
            return (int.from_bytes(self._entropy(8)) >> 11) * 2.0**-53
        array = np.empty(size)
        flat = array.reshape(-1)
        stream = np.empty(8 * min(2 * _PAIRS, flat.size) + _BLOCK, np.uint8)
        key = self._key()
        for start in range(0, flat.size, 2 * _PAIRS):
            chunk = flat[start : start + 2 * _PAIRS]
            key.update_into(memoryview(_ZEROS)[: 8 * chunk.size], stream.data)
            np.multiply(stream[: 8 * chunk.size].view(np.uint64) >> 11, 2.0**-53, out=chunk)
        return array

    def standard_normal(
        self,
        size: int | tuple[int, ...] | None = None,
        dtype: DTypeLike = np.float64,
        out: NDArray[Any] | None = None,
    ) -> Any:
        """Independent N(0, 1) numbers of ``dtype`` float64 or float32, with numpy's signature.

        A float for neither ``size`` nor ``out``, else an array; ``out`` must be C-contiguous and of
        ``dtype``.
        """
        wanted = np.dtype(dtype)
        if wanted not in (np.float64, np.float32):
            raise ValueError(f"Expected dtype float64 or float32, found {wanted}")
        if out is None:
            array = np.empty(() if size is None else size, wanted)
        elif out.dtype != wanted or not out.flags.c_contiguous or size not in (None, out.shape, out.size):
            raise ValueError(f"Expected out to be C-contiguous {wanted} of size {size}, found {out.dtype} {out.shape}")
        else:
            array = out
        box_muller: Callable[..., None] = _box_muller if wanted == np.float64 else _box_muller_single
        width = 8 + wanted.itemsize  # random bytes for a pair: its radius, its angle
        flat = array.reshape(-1)
        stream = np.empty(width * min(_PAIRS, flat.size // 2 + 1) + _BLOCK, np.uint8)
        key = self._key()
        for start in range(0, flat.size, 2 * _PAIRS):
            chunk = flat[start : start + 2 * _PAIRS]
            even = chunk if chunk.size % 2 == 0 else np.empty(chunk.size + 1, wanted)
            pairs = even.size // 2
            key.update_into(memoryview(_ZEROS)[: width * pairs], stream.data)
            radius_bits = stream[: 8 * pairs].view(np.int64)
            angle_bits = stream[8 * pairs : width * pairs].view(f"i{wanted.itemsize}")
            box_muller(radius_bits, angle_bits, even[:pairs], even[pairs:])
            if even is not chunk:
                chunk[:] = even[:-1]
        return float(array) if out is None and size is None else array

    def standard_gamma(self, shape: float) -> float:
        """One Gamma(``shape``, scale 1) number; ``shape`` at least 1, as every dimension is.

        Marsaglia and Tsang, "A simple method for generating gamma variables", ACM TOMS 26 (2000).
        """
        if not 1 <= shape < math.inf:
            raise ValueError(f"Expected shape >= 1 and finite, found {shape}")
        d = shape - 1 / 3
        c = 1 / math.sqrt(9 * d)
        while True:
            x = float(self.standard_normal())
            v = (1 + c * x) ** 3
            if v > 0 and math.log(1 - self.random()) < x * x / 2 + d * (1 - v + math.log(v)):
                return d * v

    def _key(self) -> CipherContext:
        """A stream of random bytes (AES-256 in counter mode) from a fresh key."""
        return Cipher(algorithms.AES256(self._entropy(32)), modes.CTR(bytes(_BLOCK))).encryptor()

    def _entropy(self, count: int) -> bytes:
        """``count`` bytes from the operating system: the only source of everything above."""
        return os.urandom(count)


def _box_muller(
    radius_bits: NDArray[np.int64],
    angle_bits: NDArray[np.int64],
    first: NDArray[np.float64],
    second: NDArray[np.float64],
) -> None:
    """Write the pairs (r·cos θ, r·sin θ) to ``first`` and ``second``. ``radius_bits`` is used as scratch space.

    With t = tan(θ/2) and q = 2r/(1 + t²) the pair is (q − r, q·t): one tangent in place of a sine and a
    cosine, as numpy has vector code for the tangent but not for the other two in float64.
    """
    _log_uniforms(radius_bits, first)
    first *= -2.0
    np.sqrt(first, out=first)
    np.multiply(angle_bits, math.pi * 2.0**-64, out=second)  # θ/2 is uniform on [−π/2, π/2]
    np.tan(second, out=second)
    q = radius_bits.view(np.float64)
    np.multiply(second, second, out=q)
    q += 1.0
    np.divide(first, q, out=q)
    q *= 2.0
    second *= q
    np.subtract(q, first, out=first)


def _box_muller_single(
    radius_bits: NDArray[np.int64],
    angle_bits: NDArray[np.int32],
    first: NDArray[np.float32],
    second: NDArray[np.float32],
) -> None:
    """As ``_box_muller``, in float32 after the logarithm; numpy has vector code for these sines and cosines."""
    logarithm = radius_bits.view(np.float64)
    _log_uniforms(radius_bits, logarithm)
    radius = logarithm.astype(np.float32)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    second[:] = angle_bits
    second *= np.float32(math.pi * 2.0**-31)  # θ is uniform on [−π, π]
    np.cos(second, out=first)
    first *= radius
    np.sin(second, out=second)
    second *= radius


def _log_uniforms(bits: NDArray[np.int64], out: NDArray[np.float64]) -> None:
    """ln u for u = |bits|·2⁻⁶³ + 2⁻⁶⁴, which is in [2⁻⁶⁴, 1] and never 0.

    ``out`` may be the memory of ``bits``. The integers are signed, as numpy converts those much faster.
    """
    np.multiply(bits, 2.0**-63, out=out)
    np.abs(out, out=out)
    out += 2.0**-64
    np.log(out, out=out)
