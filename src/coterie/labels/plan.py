"""What a data holder asked for: mechanism, price, and the public knowledge it uses. No private label is in here."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import CoterieError
from coterie.labels.alphabet import Alphabet
from coterie.labels.tables import Table, open_table
from coterie.mechanisms.labels.arguments import Array, Integers, expect_priors
from coterie.mechanisms.labels.prior import public_label_prior


class Mechanism(StrEnum):
    """Randomizers that give one noisy label for each row."""

    RR = "rr"
    RR_TOP_K = "rr-top-k"
    RR_WITH_PRIOR = "rr-with-prior"
    CLUSTER_RR = "cluster-rr"
    UNIFORM_RR = "uniform-rr"
    P2P = "p2p"


_WITH_PRIOR = {Mechanism.RR_TOP_K, Mechanism.RR_WITH_PRIOR}
_WITH_CLUSTERS = {Mechanism.CLUSTER_RR, Mechanism.P2P}


@dataclass(frozen=True)
class Plan:
    """The choices of one release, all of them public. Raises ``CoterieError`` for choices that do not go together.

    ``k`` is for rr-top-k, ``floor`` (τ) for cluster-rr, ``delta`` for p2p. ``prior`` is a file of probabilities and
    ``public`` a table of public labels. ``group`` is a column that divides the rows: for a prior of each group, or as
    clusters; ``features`` are columns that k-means makes ``clusters`` of.
    """

    mechanism: Mechanism
    epsilon: float
    alphabet: Alphabet
    delta: float | None = None
    k: int | None = None
    floor: float | None = None
    prior: Path | None = None
    public: Path | None = None
    group: str | None = None
    features: tuple[str, ...] = ()
    clusters: int | None = None

    def __post_init__(self) -> None:
        name = self.mechanism.value
        if not 0 < self.epsilon < math.inf:
            raise CoterieError(f"Expected --epsilon above 0 and finite, found {self.epsilon}")
        allowed = {
            "k": {Mechanism.RR_TOP_K},
            "floor": {Mechanism.CLUSTER_RR},
            "delta": {Mechanism.P2P},
            "prior": _WITH_PRIOR,
            "public": _WITH_PRIOR,
            "group": _WITH_PRIOR | _WITH_CLUSTERS,
            "features": _WITH_CLUSTERS,
            "clusters": _WITH_CLUSTERS,
        }
        for option, mechanisms in allowed.items():
            if getattr(self, option) not in (None, ()) and self.mechanism not in mechanisms:
                fit = " or ".join(sorted(mechanisms))
                raise CoterieError(f"Expected --{option} with --mechanism {fit} only, found it with {name}")
        for option, mechanisms in {"k": {Mechanism.RR_TOP_K}, "floor": {Mechanism.CLUSTER_RR}}.items():
            if getattr(self, option) is None and self.mechanism in mechanisms:
                raise CoterieError(f"Expected --{option} with --mechanism {name}, found none")
        if self.mechanism in _WITH_PRIOR:
            self._expect_one("prior", "public", least=0)
            if self.public is not None and self.group is None:
                raise CoterieError("Expected --group with --public: the column whose values share a prior, found none")
        if self.mechanism in _WITH_CLUSTERS:
            self._expect_one("group", "features", least=1)
            if bool(self.features) != (self.clusters is not None):
                raise CoterieError("Expected --features and --clusters together, found only one of them")
            if self.clusters is not None and self.clusters < 1:
                raise CoterieError(f"Expected --clusters of 1 or more, found {self.clusters}")
        if self.mechanism is Mechanism.P2P and self.alphabet.classes != 2:
            raise CoterieError(f"Expected 2 possible labels with p2p, found {self.alphabet.classes}")

    def _expect_one(self, first: str, second: str, *, least: int) -> None:
        found = sum(bool(getattr(self, name)) for name in (first, second))
        if not least <= found <= 1:
            wanted = "one" if least else "at most one"
            raise CoterieError(f"Expected {wanted} of --{first} and --{second}, found {('none', '', 'both')[found]}")

    def identity(self) -> dict[str, Any]:
        """The choices as JSON, files by the SHA-256 of their content: equal plans have equal identities."""
        own = asdict(self) | {"alphabet": list(self.alphabet.names), "features": list(self.features)}
        for name in ("prior", "public"):
            path = getattr(self, name)
            own[name] = None if path is None else hashlib.sha256(_content(path)).hexdigest()
        return own


@dataclass(frozen=True)
class Groups:
    """The group of each row (n,), from 0 on, and what the groups are called (k-means clusters have no names)."""

    members: Integers
    count: int
    names: tuple[str, ...] = ()


def groups_of(plan: Plan, table: Table) -> Groups | None:
    """The rows' groups, from public columns only: the values of one, or k-means clusters of several; None for none.

    k-means is scikit-learn's, on the numbers as they are (scale them first if their units differ), from a fixed start:
    the clusters are no secret, and the same table gives the same ones.
    """
    if plan.group is not None:
        codes, names = table.coded(table.expect_column(plan.group, "--group"))
        return Groups(codes, len(names), tuple(names))
    if not plan.features:
        return None
    from sklearn.cluster import KMeans

    numbers = table.numbers([table.expect_column(name, "--features") for name in plan.features])
    count = plan.clusters or 1
    if count > len(numbers):
        raise CoterieError(f"Expected at most as many --clusters as the {len(numbers)} rows, found {count}")
    members = KMeans(count, random_state=0).fit_predict(numbers)
    return Groups(members.astype(np.int64), count)


def prior_of(plan: Plan, groups: Groups | None, label: str, rows: int) -> Array:
    """Prior weights: (K,) for all rows, (G, K) for each group, or (n, K) for each row; uniform if none is given."""
    classes = plan.alphabet.classes
    if plan.public is not None and groups is not None and plan.group is not None:
        public = open_table(plan.public)
        codes, values = public.coded(public.expect_column(label, "--label"))
        labels = plan.alphabet.encode(codes, values, column=label)
        own, names = public.coded(public.expect_column(plan.group, "--group"))
        place = {name: number for number, name in enumerate(groups.names)}
        # Groups that no private row is in are one more, which nobody asks for.
        members = np.asarray([place.get(name, groups.count) for name in names], np.int64)[own]
        table = public_label_prior(labels, members, classes=classes, group_count=groups.count + 1)
        return table[: groups.count]
    if plan.prior is None:
        return np.ones(classes) if groups is None else np.ones((groups.count, classes))
    weights = _read_prior(plan, groups, rows)
    try:
        return np.asarray(expect_priors(f"the prior in {plan.prior}", weights, classes), np.float64)
    except ValueError as error:
        raise CoterieError(str(error)) from error


def _read_prior(plan: Plan, groups: Groups | None, rows: int) -> Array:
    path, classes = Path(plan.prior or ""), plan.alphabet.classes
    if path.suffix.lower() == ".npy":
        _content(path)
        try:
            weights = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise CoterieError(f"Expected an array of probabilities in {path}, found: {error}") from error
        if groups is not None:
            raise CoterieError("Expected --group with a table of priors (.csv, .parquet), found it with an .npy array")
        if weights.shape not in {(classes,), (rows, classes)}:
            raise CoterieError(
                f"Expected {path} of shape ({classes},), or ({rows}, {classes}) with a prior for each row, found "
                f"{weights.shape}"
            )
        return np.asarray(weights)
    table = open_table(path)
    weights = table.numbers([table.expect_column(name, "every possible label") for name in plan.alphabet.names])
    if groups is None or plan.group is None:
        if len(weights) != 1:
            raise CoterieError(f"Expected 1 row in {path} without --group, found {len(weights)}")
        return np.asarray(weights[0])
    codes, names = table.coded(table.expect_column(plan.group, "--group"))
    if len(names) != len(codes):
        raise CoterieError(f"Expected one row a group in {path}, found several for one of {plan.group!r}")
    place = {names[code]: row for row, code in enumerate(codes)}
    missing = [name for name in groups.names if name not in place]
    if missing:
        raise CoterieError(f"Expected a prior for every {plan.group!r} in {path}, found none for {_few(missing)}")
    return np.asarray(weights[[place[name] for name in groups.names]])


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CoterieError(f"Expected to read {path}, found: {error}") from error
