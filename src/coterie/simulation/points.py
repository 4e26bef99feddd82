"""A sweep's folder: a file for each finished grid point, and one that says of which sweep they are."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.simulation.first_rows import losses_and_scores
from coterie.simulation.rows import Rows
from coterie.simulation.settings import SimulatedRun
from coterie.storage import write_atomically
from coterie.tasks import Task

# What can be swept, by the paper's letters: the setting, and the kind of number it is.
SWEPT: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "k": ("hypotheses", int),
    "nu": ("noise_multiplier", float),
    "C": ("clipping_norm", float),
    "T": ("rounds", int),
}
_GO_ON = "finished grid points are kept: run the same command again to go on"
ELSEWHERE = "give another --out"

Point = dict[str, int | float]  # a value for each swept letter
Record = dict[str, Any]  # what ``SimulatedResult.summary`` says, and the point


class SweepFolder:
    """The points of one sweep: its settings, except for what is swept, its seeds, and its task and data."""

    def __init__(self, path: Path, base: SimulatedRun, letters: Sequence[str], seeds: int, content: str) -> None:
        """``content`` is the ``fingerprint``. ``path`` must exist, with a folder ``points``.

        Raises ``CoterieError`` for a folder with points of another sweep, and when it cannot be written. The same
        sweep may have more values of the same ``letters``: finished points stay.
        """
        self._path = path
        self._content = content
        swept = [letter for letter in SWEPT if letter in letters]
        settings = {"swept names": swept, **_settings([base] * seeds, content)}
        for letter in swept:
            del settings[SWEPT[letter][0]]
        file = path / "sweep.json"
        if not any(path.glob("points/*.json")):
            with writing(path):
                write_atomically(file, _json({"settings": settings}))
        elif (known := _read(file, f"the settings of a sweep in {file}", ELSEWHERE)) is None:
            raise CoterieError(f"Expected the points of a sweep in --out {path}, found no sweep.json: {ELSEWHERE}")
        else:
            _expect_same(file, known.get("settings"), settings)

    def read(self, point: Point, runs: Sequence[SimulatedRun]) -> list[Record]:
        """The records of a finished point, one a seed; none if it is not finished.

        Raises ``CoterieError`` for a file that is of other settings, or no such file at all.
        """
        file = self._file(point)
        what = f"a finished grid point in {file}"
        if (known := _read(file, what, "remove it")) is None:
            return []
        _expect_same(file, known.get("settings"), _settings(runs, self._content))
        records = known.get("records")
        if not isinstance(records, list) or len(records) != len(runs):
            raise CoterieError(f"Expected {what}, with {len(runs)} records, found {_shown(records)}: remove it")
        for seed, record in enumerate(records):
            if bad := _unlike(record, seed, point):
                raise CoterieError(f"Expected {what}, found {bad} in the record of seed {seed}: remove it")
        return [{**point, **record} for record in records]  # in the order of this command's options

    def write(self, point: Point, runs: Sequence[SimulatedRun], records: list[Record]) -> None:
        """Keep a finished point. Raises ``CoterieError`` when it cannot be written."""
        with writing(self._path):
            write_atomically(self._file(point), _json({"settings": self.settings(runs), "records": records}))

    def settings(self, runs: Sequence[SimulatedRun]) -> dict[str, Any]:
        """What a point's runs have in common."""
        return _settings(runs, self._content)

    def _file(self, point: Point) -> Path:
        in_order = [f"{letter}={point[letter]!r}" for letter in SWEPT if letter in point]
        return self._path / "points" / f"{','.join(in_order) or 'point'}.json"


def fingerprint(task: Task, rows: Rows) -> str:
    """Of the rows and where they are, of this coterie, and of what the task says where a run's settings do not.

    Functions have no text here: of the model, loss and score it is what they give for the first rows, to four digits,
    as another machine may differ in the last ones.
    """
    norms = dict(task.clipping_norm) if isinstance(task.clipping_norm, Mapping) else task.clipping_norm
    entries = [(entry.name, entry.shape) for entry in layout_of(task.build()).entries]
    values = [[f"{value:.4g}" for value in found.tolist()] for found in losses_and_scores(task, rows)]
    said = [
        *(version("coterie"), rows.inputs.device.type, task.name, task.metric, norms, asdict(task.training)),
        *(entries, values, rows.names, rows.counts.tolist()),
    ]
    digest = hashlib.sha256(json.dumps(said).encode())
    for tensor in (rows.inputs, rows.targets):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def writing(folder: Path, advice: str = _GO_ON) -> Iterator[None]:
    """Turns a file system's refusal into one line."""
    try:
        yield
    except OSError as error:
        raise CoterieError(f"Expected to write to --out {folder}, found: {error}; {advice}") from error


def _settings(runs: Sequence[SimulatedRun], content: str) -> dict[str, Any]:
    like = {**asdict(runs[0]), "seeds": len(runs), "task and data": content}
    return {name: value for name, value in like.items() if name != "seed"}


def _read(file: Path, what: str, advice: str) -> dict[str, Any] | None:
    """A JSON object, None where there is no file."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CoterieError(f"Expected {what}, found: {error}; {advice}") from error
    if not isinstance(known, dict):
        raise CoterieError(f"Expected {what}, found {_shown(known)}; {advice}")
    return known


def _expect_same(file: Path, found: object, settings: Mapping[str, Any]) -> None:
    wanted = json.loads(json.dumps(settings))
    if not isinstance(found, dict):
        raise CoterieError(f"Expected {file} to hold settings, found {_shown(found)}: {ELSEWHERE}, or remove it")
    if found != wanted:
        other = next((name for name in wanted if found.get(name) != wanted[name]), "its settings")
        raise CoterieError(f"Expected {file} to be of this sweep, found another {other}: {ELSEWHERE}")


def _is_whole(value: object) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_number(value: object) -> bool:
    return _is_whole(value) or (type(value) is float and math.isfinite(value))


def _is_number_or_null(value: object) -> bool:
    return value is None or _is_number(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _are_whole(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_price(value: object) -> bool:
    return value is None or (isinstance(value, dict) and _misfit(value, _PRICE) is None)


_Fields = Mapping[str, Callable[[object], bool]]
_PRICE: _Fields = {
    "releases": _is_whole,
    "pure": _is_number_or_null,
    "tight": _is_number_or_null,
    "local_pure": _is_number_or_null,
    "local_tight": _is_number_or_null,
    "delta": _is_number,
    "formal": _is_truth,
    "notes": _are_texts,
}
_RECORD: _Fields = {
    "seed": _is_whole,
    "metric": _is_number_or_null,
    "honest_metric": _is_number_or_null,
    "honest_loss": _is_number_or_null,
    "honest_left_out": _is_whole,
    "fine_tuned_metric": _is_number_or_null,
    "metric_name": _is_text,
    "clients_per_hypothesis": _are_whole,
    "collapsed": _is_truth,
    "rounds": _is_whole,
    "best_round": _is_whole,
    "reseeded": _is_whole,
    "price": _is_price,
}


def _unlike(record: object, seed: int, point: Point) -> str | None:
    """What in ``record`` is not of a run of that seed at that point."""
    if not isinstance(record, dict):
        return _shown(record)
    if bad := _misfit(record, {**_RECORD, **dict.fromkeys(point, _is_number)}):
        return bad
    wanted = {"seed": seed, **point}
    return next((f"{name} = {_shown(record[name])}" for name in wanted if record[name] != wanted[name]), None)


def _misfit(found: Mapping[str, Any], fields: _Fields) -> str | None:
    if names := sorted(fields.keys() ^ found.keys()):
        return f"{'no ' if names[0] in fields else ''}{_shown(names[0])}"
    return next((f"{name} = {_shown(found[name])}" for name, fits in fields.items() if not fits(found[name])), None)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
