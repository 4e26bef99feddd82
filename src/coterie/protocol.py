"""What server and client say to each other, free of Flower: frozen messages and their plain fields.

A message is a flat dictionary of scalars plus a dictionary of arrays. The k hypotheses travel packed as one
(k, n) float32 array: Flower costs a request per array, so one array is what keeps a round fast.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.config import Assignment, Weighting
from coterie.mechanisms.events import Neighbourhood
from coterie.tasks import TrainingSettings

Vector = NDArray[np.float32]
_LONGEST = 1000
_MOST = 2**31 - 1  # no count in a message has a use for more, and every database and C library holds it
Scalar = bool | int | float | str


class MalformedMessage(ValueError):  # noqa: N818  (it names what was found)
    """A peer's message that lacks a field, or has one of another kind or shape."""


@dataclass(frozen=True)
class Fields:
    """A message's content: named scalars and named arrays."""

    scalars: Mapping[str, Scalar]
    arrays: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class PrivacyProposal:
    """What the server would like; None leaves it to the client, who accepts no less than its own settings."""

    noise_multiplier: float | None = None
    neighbourhood: Neighbourhood | None = None
    clipping_norm: float | None = None


@dataclass(frozen=True)
class TrainRequest:
    """Take the hypothesis that fits, train it, sanitize the update and send it."""

    run: str
    round: int
    task: str
    hypotheses: Vector  # (k, n)
    assignment: Assignment
    weighting: Weighting
    training: TrainingSettings
    proposal: PrivacyProposal

    def to_fields(self) -> Fields:
        """The request as plain fields."""
        optional = {
            "proposed-noise-multiplier": self.proposal.noise_multiplier,
            "proposed-neighbourhood": self.proposal.neighbourhood,
            "proposed-clipping-norm": self.proposal.clipping_norm,
        }
        scalars: dict[str, Scalar] = {
            "run": self.run,
            "round": self.round,
            "task": self.task,
            "assignment": str(self.assignment),
            "weighting": str(self.weighting),
            "epochs": self.training.epochs,
            "step-size": self.training.step_size,
            "batch-size": self.training.batch_size,
        }
        for name, value in optional.items():
            if value is not None:
                scalars[name] = str(value) if isinstance(value, Neighbourhood) else value
        return Fields(scalars, {"hypotheses": self.hypotheses})

    @classmethod
    def parse(cls, fields: Fields) -> "TrainRequest":
        """The request in ``fields``. Raises ``MalformedMessage``."""
        take = _Reader(fields.scalars)
        return cls(
            run=take.text("run"),
            round=take.positive_integer("round"),
            task=take.text("task"),
            hypotheses=_hypotheses(fields),
            assignment=take.one_of("assignment", Assignment),
            weighting=take.one_of("weighting", Weighting),
            training=TrainingSettings(
                epochs=take.positive_integer("epochs"),
                step_size=take.positive_number("step-size"),
                batch_size=take.positive_integer("batch-size"),
            ),
            proposal=PrivacyProposal(
                noise_multiplier=take.optional("proposed-noise-multiplier", take.positive_number),
                neighbourhood=take.optional("proposed-neighbourhood", lambda name: take.one_of(name, Neighbourhood)),
                clipping_norm=take.optional("proposed-clipping-norm", take.positive_number),
            ),
        )


@dataclass(frozen=True)
class HypothesesMessage:
    """The k hypotheses to be validated on held-out data, or, at the end of a run, to be kept if they were trained."""

    run: str
    round: int
    task: str
    hypotheses: Vector  # (k, n)
    trained: bool = True

    def to_fields(self) -> Fields:
        """The message as plain fields."""
        scalars: dict[str, Scalar] = {"run": self.run, "round": self.round, "task": self.task, "trained": self.trained}
        return Fields(scalars, {"hypotheses": self.hypotheses})

    @classmethod
    def parse(cls, fields: Fields) -> "HypothesesMessage":
        """The message in ``fields``. Raises ``MalformedMessage``."""
        take = _Reader(fields.scalars)
        return cls(
            run=take.text("run"),
            round=take.positive_integer("round"),
            task=take.text("task"),
            hypotheses=_hypotheses(fields),
            trained=take.boolean("trained"),
        )


@dataclass(frozen=True)
class UpdateReply:
    """A sanitized vector; the index and the row count only where they were asked for and consented to."""

    release: str
    vector: Vector  # (n,)
    hypothesis: int | None
    rows: int | None

    def to_fields(self) -> Fields:
        """The reply as plain fields."""
        scalars: dict[str, Scalar] = {"kind": "update", "release": self.release}
        if self.hypothesis is not None:
            scalars["hypothesis"] = self.hypothesis
        if self.rows is not None:
            scalars["rows"] = self.rows
        return Fields(scalars, {"vector": self.vector})


@dataclass(frozen=True)
class ValidationReply:
    """A held-out client's loss and score under its best hypothesis: not protected, see docs/privacy.md."""

    loss: float
    score: float

    def to_fields(self) -> Fields:
        """The reply as plain fields."""
        return Fields({"kind": "validation", "loss": self.loss, "score": self.score}, {})


@dataclass(frozen=True)
class Acknowledgement:
    """The final hypotheses have arrived."""

    def to_fields(self) -> Fields:
        """The reply as plain fields."""
        return Fields({"kind": "acknowledgement"}, {})


@dataclass(frozen=True)
class Refusal:
    """No answer, and why. ``exhausted`` says that this client's budget allows no further release."""

    reason: str
    exhausted: bool = False

    def to_fields(self) -> Fields:
        """The reply as plain fields."""
        return Fields({"kind": "refusal", "reason": self.reason, "exhausted": self.exhausted}, {})


Reply = UpdateReply | ValidationReply | Acknowledgement | Refusal


def parse_reply(fields: Fields) -> Reply:
    """The reply in ``fields``. Raises ``MalformedMessage``; numbers may be non-finite or out of range."""
    take = _Reader(fields.scalars)
    match take.text("kind"):
        case "update":
            vector = fields.arrays.get("vector")
            if vector is None or vector.ndim != 1 or vector.dtype != np.float32:
                raise MalformedMessage("Expected a float32 array 'vector' of one dimension")
            return UpdateReply(
                release=take.text("release"),
                vector=vector,
                hypothesis=take.optional("hypothesis", take.integer),
                rows=take.optional("rows", take.positive_integer),
            )
        case "validation":
            return ValidationReply(loss=take.number("loss"), score=take.number("score"))
        case "acknowledgement":
            return Acknowledgement()
        case "refusal":
            return Refusal(take.shortened("reason"), exhausted=take.boolean("exhausted"))
        case kind:
            raise MalformedMessage(f"Expected a known kind of reply, found {kind!r}")


def printable(text: str) -> str:
    """A peer's text as one short line for a log: control characters, which could forge lines, are replaced."""
    return "".join(character if character.isprintable() else "�" for character in text[:200])


def _hypotheses(fields: Fields) -> Vector:
    packed = fields.arrays.get("hypotheses")
    if packed is None or packed.ndim != 2 or packed.dtype != np.float32 or 0 in packed.shape:
        found = "nothing" if packed is None else f"{packed.dtype} of shape {packed.shape}"
        raise MalformedMessage(f"Expected hypotheses as a float32 array of shape (k, n), found {found}")
    return packed


T = TypeVar("T")


class _Reader:
    """Typed access to a peer's scalars."""

    def __init__(self, scalars: Mapping[str, Scalar]) -> None:
        self._scalars = scalars

    def _value(self, name: str) -> Scalar:
        if name not in self._scalars:
            raise MalformedMessage(f"Expected field {name!r}, found {printable(str(sorted(self._scalars)))}")
        return self._scalars[name]

    def _fail(self, name: str, expected: str) -> MalformedMessage:
        return MalformedMessage(f"Expected {name!r} to be {expected}, found {self._scalars[name]!r:.80}")

    def text(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str) or not 0 < len(value) <= _LONGEST:
            raise self._fail(name, f"a text of 1 to {_LONGEST} characters")
        return value

    def shortened(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str):
            raise self._fail(name, "text")
        return printable(value)

    def boolean(self, name: str) -> bool:
        value = self._value(name)
        if not isinstance(value, bool):
            raise self._fail(name, "true or false")
        return value

    def integer(self, name: str) -> int:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._fail(name, "an integer")
        return value

    def positive_integer(self, name: str) -> int:
        value = self.integer(name)
        if not 1 <= value <= _MOST:
            raise self._fail(name, f"an integer from 1 to {_MOST}")
        return value

    def number(self, name: str) -> float:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._fail(name, "a number")
        return float(value)

    def positive_number(self, name: str) -> float:
        value = self.number(name)
        if not (value > 0 and math.isfinite(value)):
            raise self._fail(name, "a finite number above 0")
        return value

    def one_of(self, name: str, kind: Callable[[str], T]) -> T:
        value = self.text(name)
        try:
            return kind(value)
        except ValueError:
            raise self._fail(name, f"a {getattr(kind, '__name__', 'known value')}") from None

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        return read(name) if name in self._scalars else None
