"""Hospital charges: predict a stay's average total payment from the service and the hospital's place.

Data: the CMS IPPS provider summary (FY2011), the four DRGs with the most rows, one a condition; one data
holder per provider (3,151 of them) or per ZIP code (2,948). Model: Linear(3, 2) - ReLU - Linear(2, 1), 11
parameters, as in arXiv 2206.03396, section 5.2.

Inputs and target are brought to O(1) by the public constants below, chosen from the geography of the United
States and the price level of a hospital stay, not from anybody's rows: no data holder learns another's
statistics, and a hospital alone can scale its own file.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from coterie.datasets.files import stem
from coterie.datasets.hospital_csv import (
    DRG,
    PAYMENT,
    PROVIDER,
    ZIP_CODE,
    Row,
    read_rows,
    zip_coordinates,
)
from coterie.datasets.losses import squared_error
from coterie.datasets.partition import choose_partition, mixed_order
from coterie.errors import CoterieError
from coterie.tasks import ClientData, Dataset, DataSource, PredictionTable, Task, TrainingSettings, seeded_module

# DRGs: pneumonia with CC, heart failure with CC, digestive disorders and urinary infections without MCC.
SERVICES = (194, 292, 392, 690)

# The contiguous states span longitudes -125..-67 and latitudes 25..49: their middle goes to 0 and their
# edges near ±1. Hawaii and Alaska stay within ±2.2.
LONGITUDE_CENTRE, LONGITUDE_SCALE = -96.0, 30.0  # degrees
LATITUDE_CENTRE, LATITUDE_SCALE = 37.0, 12.5  # degrees
# The four services, 0..3, go to -1, -1/3, 1/3, 1.
SERVICE_CENTRE, SERVICE_SCALE = 1.5, 1.5
# A US hospital stay costs of the order of ten thousand dollars.
PAYMENT_SCALE = 10_000.0  # dollars
STARTING_LEVEL = (0.5, 1.2)  # in units of PAYMENT_SCALE: a guess of the range of price levels


class PaymentModel(nn.Module):
    """Linear(3, 2) - ReLU - Linear(2, 1) with biases: 6 + 2 + 2 + 1 = 11 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 2)
        self.output = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(rows, 3) → (rows, 1), payments in units of ``PAYMENT_SCALE``."""
        outputs: torch.Tensor = self.output(torch.relu(self.hidden(inputs)))
        return outputs


def scaled_inputs(service: int, longitude: float, latitude: float) -> tuple[float, float, float]:
    """The model's three inputs of a service (its position in ``SERVICES``) and a place."""
    return (
        (service - SERVICE_CENTRE) / SERVICE_SCALE,
        (longitude - LONGITUDE_CENTRE) / LONGITUDE_SCALE,
        (latitude - LATITUDE_CENTRE) / LATITUDE_SCALE,
    )


@dataclass
class _Skipped:
    """Counts of the rows that were left out, and why."""

    other_services: int = 0
    unknown_zips: Counter[str] = field(default_factory=Counter)

    def notes(self, path: Path) -> tuple[str, ...]:
        notes = []
        if self.other_services:
            drgs = ", ".join(map(str, SERVICES))
            notes.append(f"{path.name}: {self.other_services} rows left out: of DRGs other than {drgs}")
        if self.unknown_zips:
            examples = ", ".join(repr(code) for code in sorted(self.unknown_zips)[:3])
            more = ", …" if len(self.unknown_zips) > 3 else ""
            notes.append(
                f"{path.name}: {self.unknown_zips.total()} rows skipped: ZIP code does not resolve ({examples}{more})"
            )
        return tuple(notes)


def _usable(
    rows: Iterable[Row], *, strict: bool, skipped: _Skipped
) -> Iterable[tuple[Row, tuple[float, float, float]]]:
    """The rows of the four services at a known place, with their scaled inputs; the others are counted."""
    places = zip_coordinates()
    for row in rows:
        drg = row.drg()
        if drg not in SERVICES:
            skipped.other_services += 1
            continue
        place = places.get(row.zip_code())
        if place is None:
            if strict:
                raise row.error(ZIP_CODE, "a US ZIP code that resolves to a place (strict)")
            skipped.unknown_zips[row.zip_code()] += 1
            continue
        yield row, scaled_inputs(SERVICES.index(drg), *place)


def read(source: DataSource) -> Dataset:
    """Read a CMS IPPS file: one data holder, or one per ``provider`` or ``zip``, in a fixed well-mixed order.

    A row whose ZIP code does not resolve is counted and skipped (an error when ``source.strict``); a
    payment or DRG that cannot be read is an error that names the place. Raises ``CoterieError`` when no
    usable row is left.
    """
    partition = choose_partition(source.partition_by, ("provider", "zip"), "hospital")
    if source.path is None:
        raise CoterieError("Expected --data with a CMS IPPS file (.csv, .csv.xz or .csv.gz), found none")
    required = (DRG, ZIP_CODE, PAYMENT) + ((PROVIDER,) if partition == "provider" else ())
    _, rows = read_rows(source.path, required)
    skipped = _Skipped()
    everyone: set[str] = set()
    inputs: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    targets: defaultdict[str, list[float]] = defaultdict(list)

    def holder(row: Row) -> str:
        if partition == "provider":
            return f"provider-{row.provider()}"
        return f"zip-{row.zip_code()}" if partition == "zip" else stem(source.path or Path())

    def named(rows: Iterable[Row]) -> Iterable[Row]:
        for row in rows:
            everyone.add(holder(row))
            yield row

    for row, scaled in _usable(named(rows), strict=source.strict, skipped=skipped):
        inputs[holder(row)].append(scaled)
        targets[holder(row)].append(row.payment() / PAYMENT_SCALE)
    notes = skipped.notes(source.path)
    if not inputs:
        raise CoterieError(
            f"Expected rows of DRG {', '.join(map(str, SERVICES))} in {source.path}, found none"
            + (f" ({'; '.join(notes)})" if notes else "")
        )
    if idle := len(everyone) - len(inputs):
        notes += (f"{source.path.name}: {idle} data holders left out: no usable row",)
    clients = tuple(
        ClientData(
            name,
            torch.tensor(inputs[name], dtype=torch.float32),
            torch.tensor(targets[name], dtype=torch.float32)[:, None],
        )
        for name in mixed_order(inputs)
    )
    return Dataset(clients, notes)


def read_inputs(path: Path) -> PredictionTable:
    """The usable rows of a file for `coterie predict`: all of its columns, with or without the payments."""
    header, rows = read_rows(path, (DRG, ZIP_CODE))
    skipped = _Skipped()
    columns: dict[str, list[object]] = {name: [] for name in header}
    inputs = []
    for row, scaled in _usable(rows, strict=False, skipped=skipped):
        inputs.append(scaled)
        for name in header:
            columns[name].append(row.text(name))
    notes = skipped.notes(path)
    if not inputs:
        raise CoterieError(
            f"Expected rows of DRG {', '.join(map(str, SERVICES))} in {path}, found none"
            + (f" ({'; '.join(notes)})" if notes else "")
        )
    return PredictionTable(torch.tensor(inputs, dtype=torch.float32), columns, notes)


def in_dollars(outputs: torch.Tensor) -> Sequence[float]:
    """Predicted payments in dollars and cents, one a row."""
    return [round(float(value), 2) for value in outputs[:, 0].double() * PAYMENT_SCALE]


def initialise(rng: np.random.Generator) -> PaymentModel:
    """One hypothesis that starts near a constant price level, with both hidden units alive everywhere.

    Hidden weights ~ N(0, 0.1²) and biases 1: in the contiguous states a unit's input is 1 ± 0.17 (one
    standard deviation at the corners), so the ReLUs pass gradients for every data holder. Output weights ~
    N(0, 0.3²). The output bias puts the prediction at the inputs' origin at a price level uniform in
    ``STARTING_LEVEL``: hypotheses differ most in price level, which is what hospitals differ in, and none
    starts with slopes that it must unlearn.
    """
    hidden = rng.normal(0.0, 0.1, (2, 3))
    output = rng.normal(0.0, 0.3, 2)
    level = rng.uniform(*STARTING_LEVEL)
    module = seeded_module(PaymentModel, rng)
    with torch.no_grad():
        module.hidden.weight.copy_(torch.tensor(hidden))
        module.hidden.bias.fill_(1.0)
        module.output.weight.copy_(torch.tensor(output)[None, :])
        module.output.bias.fill_(float(level - output.sum()))
    return module


task = Task(
    name="hospital",
    build=PaymentModel,
    loss=squared_error,
    score=squared_error,
    metric="RMSE in dollars",
    higher_is_better=False,
    read=read,
    initialise=initialise,
    # Chosen by a simulated trial at ν = 3 with 100 data holders a round: with larger radii there is more noise than
    # signal in the end, and with smaller ones some starts are too far away for 150 rounds. The output layer's is the
    # smaller one, as its three parameters get more noise each than the hidden layer's eight.
    clipping_norm={"hidden": 0.05, "output": 0.03},
    training=TrainingSettings(epochs=5, step_size=0.2, batch_size=10),
    report=lambda mean: float(mean**0.5) * PAYMENT_SCALE,
    partitions=("provider", "zip"),
    needs_data=True,
    read_inputs=read_inputs,
    decode=in_dollars,
    output_name="predicted_total_payment_dollars",
)
