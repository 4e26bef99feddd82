"""The labels that may occur: a public list, never read off the private column."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from coterie.errors import CoterieError
from coterie.mechanisms.labels.arguments import Integers


@dataclass(frozen=True)
class Alphabet:
    """The K possible labels, in the order of their class numbers 0 … K − 1, as text.

    The list must be known without the private labels: one that was collected from them would show which labels occur,
    with certainty. Raises ``CoterieError`` for fewer than two, an empty one, and repeated ones.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.names) < 2:
            raise CoterieError(f"Expected 2 possible labels or more, found {len(self.names)}")
        if len(set(self.names)) != len(self.names) or not all(self.names):
            raise CoterieError("Expected possible labels that are different and not empty, found some that are not")

    @classmethod
    def given(cls, *, classes: int | None, labels: str | None) -> Self:
        """From a count (labels 0 … K − 1) or a comma-separated list. Raises ``CoterieError`` for both or neither."""
        if (classes is None) == (labels is None):
            found = "neither" if classes is None else "both"
            raise CoterieError(
                f"Expected --labels a,b,c or --classes K (labels 0 … K − 1), found {found}: the possible labels are "
                "public, and are not read off the private column"
            )
        if labels is not None:
            return cls(tuple(name.strip() for name in labels.split(",")))
        return cls(tuple(str(number) for number in range(classes or 0)))

    @property
    def classes(self) -> int:
        """K."""
        return len(self.names)

    def encode(self, codes: Integers, values: list[str], *, column: str) -> Integers:
        """Class numbers (n,) of texts ``values[codes]``.

        Raises ``CoterieError`` for a text that is no label. It does not repeat the text or the row: an error line may
        end up in a log that others read.
        """
        numbers = {name: number for number, name in enumerate(self.names)}
        found = [numbers.get(value, -1) for value in values]
        if -1 in found:
            shown = ", ".join(self.names) if self.classes <= 5 else f"{self.names[0]}, …, {self.names[-1]}"
            raise CoterieError(
                f"Expected every label in {column!r} to be one of {shown}, found another one or a missing one (not "
                "shown, as labels are private): correct the table, or the list of possible labels"
            )
        return np.asarray(found, dtype=np.int64)[codes] if values else np.empty(0, np.int64)
