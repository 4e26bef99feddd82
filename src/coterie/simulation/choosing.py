"""How many hypotheses to take: k by the held-out loss of simulated runs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FEWEST_SEEDS = 2  # of one there is no standard error


@dataclass(frozen=True)
class Suggestion:
    """The k to take, and why: see ``suggest``. ``medians`` holds the median honest loss of each k."""

    at: Mapping[str, int | float]  # the other swept letters, if any: each combination has a suggestion of its own
    k: int
    best: int
    medians: Mapping[int, float]
    standard_error: float  # of the best k's median
    seeds: int  # of the best k
    passed_over: tuple[int, ...] = ()  # k of too few runs with an honest loss, which may be the better ones

    def __str__(self) -> str:
        """One sentence, with its numbers."""
        names = ", ".join(f"k = {k}" for k in self.passed_over)
        without = f"; {names}: passed over, of fewer than {FEWEST_SEEDS} runs with an honest loss" if names else ""
        return f"{self._taken()}{without}"

    def _taken(self) -> str:
        where = f"at {', '.join(f'{letter} = {value:g}' for letter, value in self.at.items())}: " if self.at else ""
        least = f"{self.medians[self.best]:.6g} (k = {self.best}, {self.seeds} seeds)"
        if self.k == self.best:
            return (
                f"{where}take k = {self.k}: its median honest loss, {least}, is the least, and no smaller k comes "
                f"within its standard error, {self.standard_error:.2g}"
            )
        return (
            f"{where}take k = {self.k}: the smallest whose median honest loss, {self.medians[self.k]:.6g}, is within "
            f"one standard error, {self.standard_error:.2g}, of the least, {least}"
        )


def suggest(records: Sequence[Mapping[str, Any]], letters: Sequence[str]) -> list[Suggestion]:
    """A k for each combination of the other swept ``letters``, from a sweep's records of several k and seeds.

    The one-standard-error rule (Breiman, Friedman, Olshen, Stone, "Classification and Regression Trees", 1984,
    Section 3.4.3): of all k whose error is at most the least error plus that one's standard error, take the smallest.
    Here the error of a k is the median over seeds of ``honest_loss``, since the paper's metric always gains by one
    hypothesis more; a single seed that collapsed or diverged moves a median little. The standard error of a median
    of m seeds is √(π/2)·σ/√m, as for normal losses, with σ = 1.4826 times the median absolute deviation.

    A k is passed over, and named, when fewer than two of its runs have an honest loss; a combination in which fewer
    than two k are left has no suggestion. Where held-out rows are private, so is the answer: no price covers it.
    """
    others = [letter for letter in letters if letter != "k"]
    groups: dict[tuple[int | float, ...], dict[int, list[float]]] = {}
    for record in records if "k" in letters else ():
        own = groups.setdefault(tuple(record[letter] for letter in others), {}).setdefault(record["k"], [])
        if record["honest_loss"] is not None:
            own.append(record["honest_loss"])
    found = []
    for key, by_k in groups.items():
        losses = {k: own for k, own in sorted(by_k.items()) if len(own) >= FEWEST_SEEDS}
        if len(losses) < 2:
            continue
        medians = {k: statistics.median(own) for k, own in losses.items()}
        best = min(medians, key=lambda k: (medians[k], k))
        error = standard_error(losses[best])
        smallest = min(k for k, median in medians.items() if median <= medians[best] + error)
        at = dict(zip(others, key, strict=True))
        passed_over = tuple(sorted(by_k.keys() - losses.keys()))
        found.append(Suggestion(at, smallest, best, medians, error, len(losses[best]), passed_over))
    return found


def standard_error(losses: Sequence[float]) -> float:
    """That of the median of some losses: see ``suggest``."""
    middle = statistics.median(losses)
    deviation = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)
    return math.sqrt(math.pi / 2) * deviation / math.sqrt(len(losses))
