"""``coterie predict``: a data holder's saved model, asked about the rows of a file."""

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from coterie.errors import CoterieError


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A client's model.safetensors.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The rows, in the form that the model's task reads.")],
    out: Annotated[
        Path | None, typer.Option(help="Write the predictions to this CSV file, not to standard output.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with one object a row.")] = False,
    task: Annotated[
        str | None, typer.Option(help="The model's task, needed when it is your own package.module:attribute.")
    ] = None,
) -> None:
    """Predict the rows of FILE with MODEL, a client's model.safetensors: the rows again, with a prediction each.

    FILE has the form that the model's task reads; for hospital a CMS file, with or without the payments.
    """
    import torch

    from coterie.models import load_model
    from coterie.storage import write_atomically

    if out is not None and as_json:
        raise CoterieError("Expected one of --out and --json, found both")
    if out is not None and out.resolve() == file.resolve():
        raise CoterieError(f"Expected --out to be another file than the rows in {file}, found the same")
    its_task, module = load_model(model, task_name=task)
    if its_task.read_inputs is None or its_task.decode is None:
        raise CoterieError(f"Expected a model of a task that predicts from files, found one for {its_task.name!r}")
    table = its_task.read_inputs(file)
    with torch.no_grad():
        predictions = its_task.decode(module(table.inputs))
    columns = {**table.columns, its_task.output_name: predictions}
    for note in table.notes:
        print(f"coterie predict: {note}", file=sys.stderr)
    if as_json:
        names = list(columns)
        rows = zip(*columns.values(), strict=True)
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
    elif out is None:
        sys.stdout.write(_as_csv(columns))
    else:
        try:
            write_atomically(out, _as_csv(columns).encode())
        except OSError as error:
            raise CoterieError(f"Expected to write the predictions to {out}, found: {error}") from error
        print(f"{len(predictions)} predictions in {out}")


def _as_csv(columns: dict[str, Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()
