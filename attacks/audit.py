"""The audit: attacks × ν × rounds × rows, resumable, on all cores, and what it leaves in its folder."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from coterie.attacks import pool
from coterie.attacks.cells import PREDICTOR, Cell, Record, check_attack, is_predictable, read_cell
from coterie.attacks.pictures import pictures_of
from coterie.attacks.plan import AuditSettings, Condition, Material, fixed_settings, prepare
from coterie.attacks.registry import ATTACKS, attack_named
from coterie.attacks.report import report_of
from coterie.attacks.results import as_json, layers_of, results_of
from coterie.errors import CoterieError
from coterie.storage import write_atomically

_ELSEWHERE = "give another --out"
_PREDICTED = 5  # images that the predictor is asked about


@dataclass(frozen=True)
class Plan:
    """A prepared audit: its cells, attack by attack and condition by condition, and what is left out and why."""

    material: Material
    attacks: tuple[str, ...]
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


def plan(settings: AuditSettings) -> Plan:
    """Read everything and find what can be attacked. Raises ``CoterieError`` before any attack is made.

    An attack that was asked for and cannot be made is an error; of all attacks, those that cannot are left out with
    a note. The control, ν = 0, is run for every attack that can be tried without noise.
    """
    asked = [(name, attack_named(name)) for name in dict.fromkeys(settings.attacks)]
    material = prepare(settings)
    noised = [condition for condition in material.conditions() if not condition.is_control]
    chosen: list[str] = []
    notes = list(material.notes)
    for name, attack in asked or ATTACKS.items():
        try:
            check_attack(attack, material, (noised or material.conditions())[0])
        except CoterieError as error:
            if asked:
                raise
            notes.append(f"{name} is left out: {error}")
        else:
            chosen.append(name)
    if not chosen:
        raise CoterieError(f"Expected an attack that applies, found none: {'; '.join(notes)}")
    cells = tuple(
        Cell(name, condition, batch)
        for name in chosen
        for condition in material.conditions()
        if _can(name, material, condition)
        for batch in range(len(material.batches))
    )
    predicts = settings.layers and is_predictable(material)
    predicted = range(min(_PREDICTED, len(material.batches)) if predicts else 0)
    cells += tuple(Cell(PREDICTOR, condition, batch) for condition in noised for batch in predicted)
    return Plan(material, tuple(chosen), cells, tuple(notes))


def _can(name: str, material: Material, condition: Condition) -> bool:
    try:
        check_attack(attack_named(name), material, condition)
    except CoterieError:
        return False
    return True


def run_audit(
    settings: AuditSettings,
    folder: Path,
    *,
    processes: int = 1,
    on_plan: Callable[[int, int], None] = lambda _all, _found: None,
    on_cell: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run the audit, or what is left of it, and write ``results.json``, ``report.html`` and the pictures.

    Cells are kept in ``folder/cells`` as they are finished; the same settings with more ν, rounds or attacks go on
    from there. ``on_plan`` is told how many cells there are and how many were found finished, ``on_cell`` of each
    further one. The figures do not depend on ``processes``. Returns the content of ``results.json``.

    Raises ``CoterieError`` before anything is attacked for settings that cannot be used, a folder that cannot be
    written, and one of another audit.
    """
    check_folder(folder)
    planned = plan(settings)
    material = planned.material
    _begin(folder, settings, material)
    known = {cell: read_cell(folder, cell, material) for cell in planned.cells}
    on_plan(len(known), sum(record is not None for record in known.values()))
    tasks = list(_tasks([cell for cell, record in known.items() if record is None]))
    several = processes > 1 and len(tasks) > 1
    running = pool.in_processes(settings, tasks, folder, processes) if several else pool.here(material, tasks, folder)
    with closing(running):
        for _ in running:
            on_cell()
    return _write(planned, folder)


def check_folder(folder: Path) -> None:
    """Raise ``CoterieError`` where ``folder``, or the nearest one above it that exists, cannot be written."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise CoterieError(f"Expected --out to be a folder, found a file: {above}; {_ELSEWHERE}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise CoterieError(f"Expected to write to --out {folder}, found that {above} is read-only: {_ELSEWHERE}")


def _begin(folder: Path, settings: AuditSettings, material: Material) -> None:
    """The folder, marked as this audit's. Raises ``CoterieError`` when it is another's."""
    mark = folder / "audit.json"
    wanted = {**fixed_settings(settings), "rows, weights and data": material.fingerprint}
    try:
        known = json.loads(mark.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = None
    except (OSError, ValueError) as error:
        raise CoterieError(f"Expected an audit's settings in {mark}, found: {error}; {_ELSEWHERE}") from error
    if known is not None:
        other = next((name for name in wanted if not isinstance(known, dict) or known.get(name) != wanted[name]), None)
        if other is not None:
            found = known.get(other) if isinstance(known, dict) else known
            detail = "" if other not in fixed_settings(settings) else f" ({found} there, {wanted[other]} now)"
            raise CoterieError(
                f"Expected --out {folder} to hold this audit, found another {other}{detail}; {_ELSEWHERE}"
            )
        return
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        write_atomically(mark, (json.dumps(wanted, indent=1) + "\n").encode())
    except OSError as error:
        raise CoterieError(f"Expected to write to --out {folder}, found: {error}; {_ELSEWHERE}") from error


def _tasks(missing: Sequence[Cell]) -> Iterator[pool.Task]:
    """Batch by batch, all conditions, so that the pace so far tells the time that is left."""
    together: dict[tuple[int, Condition], list[str]] = {}
    predicted: dict[int, list[Condition]] = {}
    for cell in missing:
        if cell.attack == PREDICTOR:
            predicted.setdefault(cell.batch, []).append(cell.condition)
        else:
            together.setdefault((cell.batch, cell.condition), []).append(cell.attack)
    tasks: list[pool.Task] = [((condition,), batch, tuple(attacks)) for (batch, condition), attacks in together.items()]
    tasks += [(tuple(conditions), batch, (PREDICTOR,)) for batch, conditions in predicted.items()]
    yield from sorted(tasks, key=lambda task: task[1])


def _write(planned: Plan, folder: Path) -> dict[str, Any]:
    material = planned.material
    cells: dict[tuple[str, Condition], list[Record]] = {}
    for cell in planned.cells:
        record = read_cell(folder, cell, material)
        if record is None:
            raise CoterieError(f"Expected every cell of {folder} to stay, found {cell.file(folder).name} gone")
        cells.setdefault((cell.attack, cell.condition), []).append(record)
    predictions = {condition: cells.pop((PREDICTOR, condition)) for name, condition in list(cells) if name == PREDICTOR}
    results = results_of(material, cells, planned.notes, layers_of(predictions, material))
    pictures = pictures_of(results, cells, material)
    try:
        for picture in pictures:
            write_atomically(folder / picture.file, picture.png)
        write_atomically(folder / "results.json", as_json(results).encode())
        write_atomically(folder / "report.html", report_of(results, pictures).encode())
    except OSError as error:
        raise CoterieError(f"Expected to write to --out {folder}, found: {error}; finished cells are kept") from error
    return results
