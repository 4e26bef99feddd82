"""What an audit says: whether it may speak at all, what it found, and what these attacks did not do.

The words are chosen so that nobody reads more into them than was measured. A leak that was found is a fact. A leak
that was not found is a fact about these attacks, this many rows and this model, with the interval's upper limit; it
is never called safe. What an audit did not find says nothing at all unless its attacks find everything when there is
no noise: that is checked first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import binom

from coterie.attacks.metrics import CONVERGED_PSNR, Rate

CONTROL_SHARE = 0.9  # of the rows, at ν = 0
_SIGNIFICANCE = 0.005
LEVELS = ("full", "recognisable", "identified", "label", "cluster")
RECONSTRUCTION_LEVELS = ("full", "recognisable", "identified")

CRITERION: Mapping[str, str] = {
    "full": "SSIM of at least 0.9 and PSNR of at least 25 dB",
    "recognisable": "identified, and correlated with the original at least as much as the 95th percentile of the "
    "class-mean image, which needs no attack",
    "identified": "nearest to the true one of up to 100 rows of the same class (chance 1 % at 100)",
    "label": "the class is right",
    "cluster": "the hypothesis that the client chose is guessed right",
}
COLUMN_CRITERION: Mapping[str, str] = {
    **CRITERION,
    "full": "the error of every column is at most 0.1 standard deviations",
    "recognisable": "identified, and nearer than the row of column means is to one row in twenty",
}


@dataclass(frozen=True)
class Summary:
    """One attack under one condition, over all rows. ``rates`` has those of ``LEVELS`` that the attack speaks of.

    ``converged`` is how often it reached the control's mark (30 dB; for table rows *full*; else what it guesses).
    ``means`` holds medians over rows: ``psnr``, ``ssim``, ``correlation``, ``mse``, or ``error``.
    """

    attack: str
    noise_multiplier: float
    rounds: int
    local_epsilon: float | None
    rates: Mapping[str, Rate]
    converged: Rate
    medians: Mapping[str, float]
    columns: tuple[float, ...]
    cpu_seconds: float

    @property
    def reconstructs(self) -> bool:
        """Whether it makes rows, rather than guessing about them."""
        return "full" in self.rates


@dataclass(frozen=True)
class Findings:
    """The verdict in words: ``validity`` first, then what was ``found``, then where attacks ``stopped``.

    ``valid`` None: no attack could be tried without noise. ``control_met`` is by attack, without those that have no
    control.
    """

    valid: bool | None
    control_met: Mapping[str, bool]
    validity: str
    found: tuple[str, ...]
    stopped: tuple[str, ...]


def chance_of(level: str, *, classes_share: float, candidates: int, hypotheses: int) -> float:
    """The rate of a guess without the observation: 0 for what no guess reaches.

    ``classes_share`` is the most frequent class's share, ``candidates`` how many rows identification chooses from.
    """
    return {"identified": 1 / candidates, "label": classes_share, "cluster": 1 / hypotheses}.get(level, 0.0)


def is_found(level: str, found: Rate, chance: float) -> bool:
    """Whether a leak was found: one row of what no guess reaches, or more hits than guesses have with p < 0.005.

    The binomial tail is exact. An audit asks this of dozens of cells, so a two-sided 95 % interval that excludes
    chance would be too little.
    """
    return found.hits > 0 if chance == 0 else float(binom.sf(found.hits - 1, found.trials, chance)) < _SIGNIFICANCE


def findings(summaries: Sequence[Summary], chances: Mapping[str, float], *, noun: str) -> Findings:
    """The verdict. ``noun`` is what a row is called, in the plural: "images"."""
    control = {s.attack: s.converged for s in summaries if s.noise_multiplier == 0}
    met = {attack: reached.rate >= CONTROL_SHARE for attack, reached in control.items()}
    reconstructing = {s.attack for s in summaries if s.reconstructs}
    valid = _valid(met, reconstructing)
    found: list[str] = []
    stopped: dict[str, list[str]] = {}  # by the sentence without the attacks' names
    for rounds in sorted({s.rounds for s in summaries if s.noise_multiplier > 0}):
        own = [s for s in summaries if s.noise_multiplier > 0 and s.rounds == rounds]
        when = "in one round" if rounds == 1 else f"in {rounds} rounds of the same {noun} at the same weights"
        for level in LEVELS:
            speaking = [s for s in own if level in s.rates]
            found += _leak(level, speaking, chances[level], when, noun)
            # Of an attack that reconstructs, the level that people care about; the others are in the table.
            alone = [s for s in speaking if level == "recognisable" or not s.reconstructs]
            for attack in dict.fromkeys(s.attack for s in alone):
                series = [s for s in alone if s.attack == attack]
                if text := _stop(level, series, chances[level], when, noun, has_control=met.get(attack, True)):
                    stopped.setdefault(text, []).append(attack)
    validity = _of_validity(valid, control, met, reconstructing, noun)
    stops = tuple(
        text.format(attacks=listed(attacks), each="it" if len(attacks) == 1 else "each of them")
        for text, attacks in stopped.items()
    )
    return Findings(valid, met, validity, tuple(found), stops)


def _valid(met: Mapping[str, bool], reconstructing: set[str]) -> bool | None:
    judged = {attack: ok for attack, ok in met.items() if attack in reconstructing} or dict(met)
    return any(judged.values()) if judged else None


def _of_validity(
    valid: bool | None, control: Mapping[str, Rate], met: Mapping[str, bool], reconstructing: set[str], noun: str
) -> str:
    if valid is None:
        return (
            "No control: none of these attacks can be tried without noise, so what they did not find says nothing "
            "about what could be found."
        )
    judged = {attack: found for attack, found in control.items() if attack in reconstructing} or dict(control)
    best = max(judged, key=lambda attack: judged[attack].rate)
    mark = (
        (f"reconstructed to {CONVERGED_PSNR:g} dB or better" if noun == "images" else "fully reconstructed")
        if best in reconstructing
        else "right"
    )
    reached = f"{best} was {mark}" if best not in reconstructing else f"{best} {mark}"
    counted = f"{judged[best].hits} of {judged[best].trials}" + (f" {noun}" if best in reconstructing else " times")
    if not valid:
        return (
            f"This audit is invalid: without noise (ν = 0) its best attack, {best}, got {counted} right where at least "
            f"{CONTROL_SHARE:.0%} are asked for. Leaks that it found below are real; what it did not find says nothing."
        )
    weak = [attack for attack in judged if not met[attack]]
    also = f" Not so {listed(weak)}: what these do not find says little." if weak else ""
    return f"Control: without noise (ν = 0), {reached} on {counted}, so the audit can see a leak.{also}"


def _leak(level: str, own: Sequence[Summary], chance: float, when: str, noun: str) -> list[str]:
    """The leak at the most noise, by the attack that is best there."""
    leaking = [s for s in own if is_found(level, s.rates[level], chance)]
    if not leaking:
        return []
    strongest = max(leaking, key=lambda s: (s.noise_multiplier, s.rates[level].rate))
    what = _DONE[level].format(noun=noun)
    return [f"At {_at(strongest)}, {when}, {strongest.attack} {what}: {_counted(strongest.rates[level])}."]


def _stop(level: str, own: Sequence[Summary], chance: float, when: str, noun: str, *, has_control: bool) -> str:
    """From which noise on an attack, left blank, found nothing, with the largest rate that the data leave possible.

    Empty when no noise stopped it.
    """
    by_noise = sorted(own, key=lambda s: s.noise_multiplier)
    leaks = [s.noise_multiplier for s in by_noise if is_found(level, s.rates[level], chance)]
    beyond = [s for s in by_noise if not leaks or s.noise_multiplier > leaks[-1]]
    if not beyond:
        return ""
    first = beyond[0]
    above = f"{_at(first)}" if len(beyond) == 1 else f"ν ≥ {first.noise_multiplier:g}{_budget(first, '≤')}"
    tested = "" if len(beyond) == 1 else f" at ν = {', '.join(f'{s.noise_multiplier:g}' for s in beyond)}"
    worst = max((s.rates[level] for s in beyond), key=lambda found: found.high)
    doubt = "" if has_control else "; without noise {each} fails as well, so this says little"
    return (
        f"{above} stopped {{attacks}} {when}: tested{tested} on {worst.trials} {noun}, {{each}} "
        f"{_NOT_DONE[level].format(noun=noun)} (at most {worst.hits} of {worst.trials}, 95 % interval up to "
        f"{worst.high:.0%}{'' if chance == 0 else f', chance {chance:.1%}'}){doubt}."
    )


def _at(summary: Summary) -> str:
    return f"ν = {summary.noise_multiplier:g}{_budget(summary, '=')}"


def _budget(summary: Summary, relation: str) -> str:
    return "" if summary.local_epsilon is None else f" (local ε {relation} {summary.local_epsilon:g} a round)"


def _counted(found: Rate) -> str:
    return f"{found.hits} of {found.trials} (95 % interval {found.low:.0%} to {found.high:.0%})"


def listed(names: Sequence[str]) -> str:
    """The names with commas and "and"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


_DONE = {
    "full": "fully reconstructed {noun}",
    "recognisable": "made {noun} recognisable",
    "identified": "identified {noun} among others of the same class",
    "label": "inferred classes",
    "cluster": "guessed the chosen hypothesis",
}
_NOT_DONE = {
    "full": "fully reconstructed none of the {noun}",
    "recognisable": "made none of the {noun} recognisable",
    "identified": "did not identify {noun} more often than chance",
    "label": "did not infer classes more often than chance",
    "cluster": "did not guess the hypothesis more often than chance",
}
