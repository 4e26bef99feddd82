"""Deterministic partitions: who comes first, who gets which rows, and whose images are turned.

All of it follows from public names and positions alone, so that every process that reads a file, at any
time and on any machine, sees the same data holders in the same order. None of it is a source of randomness
for privacy.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError


def name_hash(name: str) -> int:
    """The first 8 bytes of SHA-256 of ``name`` as an integer: the same everywhere, unlike ``hash``."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def mixed_order(names: Iterable[str]) -> list[str]:
    """``names`` in a fixed pseudo-random order: by hash, then by name.

    The first 100 are the same 100 whenever the file is read, and a file sorted by state does not make them
    all Alabama's.
    """
    return sorted(names, key=lambda name: (name_hash(name), name))


def deal(rows: int, parts: int) -> list[NDArray[np.int64]]:
    """Deal row numbers 0..rows-1 to ``parts`` data holders: a fixed shuffle, then one row each in turn.

    Sizes differ by at most one row. Raises ``CoterieError`` when a data holder would get no row.
    """
    if not 1 <= parts <= rows:
        raise CoterieError(f"Expected between 1 and {rows} parts (one row each), found {parts}")
    shuffled = np.random.Generator(np.random.PCG64(rows)).permutation(rows)
    return [np.sort(shuffled[part::parts]) for part in range(parts)]


def numbered(prefix: str, part: int, parts: int) -> str:
    """The name of data holder number ``part`` (from 0) of ``parts``: ``upright-01``."""
    return f"{prefix}-{part + 1:0{max(2, len(str(parts)))}d}"


def choose_partition(asked: str | None, allowed: tuple[str, ...], task: str) -> str | None:
    """``asked``, if the task knows that partition (None: the whole file is one data holder)."""
    if asked is not None and asked not in allowed:
        raise CoterieError(f"Expected --partition-by for {task} to be one of {', '.join(allowed)}, found {asked!r}")
    return asked
