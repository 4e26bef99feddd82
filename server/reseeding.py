"""Hypotheses that don't collapse: where they start, and a second chance for those that nobody chooses.

Pure functions on arrays. All of it post-processes what the server has anyway, its hypotheses and how many
sanitized updates each one had in past rounds, so it costs no privacy. Its random numbers are public: they only
have to differ between hypotheses, and protect nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from coterie.config import Reseed, RunSettings, Start
from coterie.protocol import Vector
from coterie.rng import seeded

Counts = tuple[int, ...]

_CANDIDATES = 10  # draws that each hypothesis is picked from, with start = spread


@dataclass(frozen=True)
class ReseedSettings:
    """When a hypothesis is idle, and how far from its model a copy starts.

    A hypothesis is idle when it had none, or less than ``share``, of all choices of the last ``after`` rounds
    that had any. (With more than 1/(2·share) hypotheses: less than half of an even share, which is 1/(2k).) Where
    U clients are sampled a round, a group that holds a part s of all clients has no choice in the window by bad
    luck with probability (1 − s)^(after·U): with few clients a round, take more rounds.

    ``perturbation`` is the relative size of a copy's displacement (see ``reseed``). In trials with the digits,
    synthetic and hospital tasks 0.02 to 0.1 did equally well; with 0.5 the digits' two groups often stayed in one
    cluster. A ``share`` of 2 % or 5 % made the hospital task's error larger; ``after`` = 3, 5 or 10 made no difference.
    """

    reseed: Reseed = Reseed.ON
    after: int = 5
    share: float = 0.01
    perturbation: float = 0.05

    @classmethod
    def of(cls, settings: RunSettings) -> "ReseedSettings":
        """Those of a run."""
        return cls(reseed=settings.reseed, after=settings.reseed_after)


@dataclass(frozen=True)
class Choices:
    """What is remembered of the rounds: each one's counts, and how long each hypothesis has had to be chosen."""

    recent: tuple[Counts, ...] = ()  # of the last ``after`` rounds with at least one update, oldest first
    ages: tuple[int, ...] = field(default=())  # (k,) rounds with at least one update since the start or a re-seed


@dataclass(frozen=True)
class Reseeded:
    """Hypotheses after a round's second chances, what to remember, and which ones were re-seeded."""

    hypotheses: Vector  # (k, n)
    choices: Choices
    indices: tuple[int, ...]


def reseed(
    hypotheses: Vector,
    counts: Sequence[int],
    choices: Choices,
    settings: ReseedSettings,
    *,
    rng: Callable[[], np.random.Generator],
) -> Reseeded:
    """Put a perturbed copy of the most populated hypothesis in the place of each idle one.

    ``hypotheses`` (k, n) and ``counts`` (k,) are those after a round's averaging. The most populated hypothesis m
    is the one with most choices in the last ``settings.after`` rounds (ties: the lowest index). An idle one
    becomes θ_m + σ·z with z ~ N(0, I_n) and σ = perturbation·‖θ_m‖₂/√n, so that its distance from θ_m is about
    ``perturbation``·‖θ_m‖₂, whatever the scale of the parameters. It then has ``after`` rounds before it can be
    idle again. All others stay as they are, and the input is not written to. Copies are held inside float32's range.

    Nothing is re-seeded before ``after`` rounds with updates have passed; a round without any changes nothing. ``rng``
    makes the generator of z: it is called in the few rounds that re-seed, as making one takes longer than the rest.
    With ``reseed`` off the hypotheses are those of the published algorithm, and only the counts are remembered.
    """
    if not any(counts):
        return Reseeded(hypotheses, choices, ())
    recent = (*choices.recent, tuple(counts))[-settings.after :]
    ages = tuple(age + 1 for age in choices.ages or (0,) * len(counts))
    idle = tuple(j for j in _idle(recent, settings) if ages[j] >= settings.after)
    if settings.reseed is Reseed.OFF or not idle:
        return Reseeded(hypotheses, Choices(recent, ages), ())
    largest = hypotheses[int(np.argmax(np.sum(recent, axis=0)))].astype(np.float64)
    deviation = settings.perturbation * np.sqrt(np.mean(largest**2))
    renewed = hypotheses.copy()
    draws = rng()
    limit = float(np.finfo(np.float32).max)
    for j in idle:
        renewed[j] = np.clip(largest + deviation * draws.standard_normal(largest.size), -limit, limit)
    ages = tuple(0 if j in idle else age for j, age in enumerate(ages))
    return Reseeded(renewed, Choices(recent, ages), idle)


def draws_of_round(seed: int, round_number: int) -> np.random.Generator:
    """The random numbers of a round's copies: public, from the run's seed, and the same in a simulation."""
    return seeded(seed, "reseed", round_number)


def collapsed(rounds: Sequence[Sequence[int]], settings: ReseedSettings) -> bool:
    """Whether all but one of k ≥ 2 hypotheses are idle at the end of ``rounds``, each one's counts (k,).

    Rounds without any update tell nothing and are passed over; fewer than ``settings.after`` others are too few to
    tell, and then it is false.
    """
    recent = [counts for counts in rounds if any(counts)][-settings.after :]
    return len(recent) > 0 and 1 <= len(recent[-1]) - 1 == len(_idle(recent, settings))


def starting(draw: Callable[[int], Vector], count: int, start: Start, *, rng: np.random.Generator) -> Vector:
    """The ``count`` hypotheses of round 1, shape (k, n), from draws of a task's initial model, ``draw(0)``, …

    With re-seeding no start did better than another in our trials, so the published one is the default.

    - ``independent``: draws 0 to k − 1, as published.
    - ``shared``: draw 0, k times. In round 1 all clients take the first (ties go to the lowest index). Who then
      prefers the untrained draw takes the second; else the others are re-seeded from the trained one. Without
      re-seeding the digits' two groups never separated from this start.
    - ``spread``: of 10·k draws k that lie far apart: draw 0, then each next one with probability proportional to
      its squared distance from the nearest one taken (k-means++ seeding, Arthur and Vassilvitskii 2007).
    """
    if start is Start.INDEPENDENT:
        return np.stack([draw(j) for j in range(count)])
    if start is Start.SHARED:
        return np.stack([draw(0)] * count)
    candidates = [draw(j) for j in range(_CANDIDATES * count)]
    taken, nearest = [0], np.full(len(candidates), np.inf)
    while len(taken) < count:
        last = candidates[taken[-1]].astype(np.float64)
        nearest = np.minimum(nearest, [float(np.sum((candidate - last) ** 2)) for candidate in candidates])
        # Where all draws are equal, any will do.
        weights = nearest if nearest.any() else np.ones_like(nearest)
        taken.append(int(rng.choice(len(candidates), p=weights / weights.sum())))
    return np.stack([candidates[j] for j in taken])


def _idle(recent: Sequence[Sequence[int]], settings: ReseedSettings) -> tuple[int, ...]:
    """The hypotheses that had none, or less than their least share, of the choices of ``after`` rounds."""
    if len(recent) < settings.after:
        return ()
    chosen = [sum(counts) for counts in zip(*recent, strict=True)]
    least = min(settings.share, 0.5 / len(chosen)) * sum(chosen)
    return tuple(j for j, count in enumerate(chosen) if count == 0 or count < least)
