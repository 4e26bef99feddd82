"""What an audit does: its settings, its grid of conditions, and the rows, models and public data that they mean."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coterie.attacks.models import AuditedModel, audited_model
from coterie.attacks.shapes import image_shape
from coterie.attacks.threat_model import Rows, ThreatModel, threat_for
from coterie.config import Granularity
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.models import load_model
from coterie.parameters import from_tensors
from coterie.protocol import Vector
from coterie.rng import seeded
from coterie.tasks import ClientData, DataSource, Task, load_task

CANDIDATES = 100  # the true rows and 99 others of the same class
HYPOTHESES = 4  # sent to the client where it is guessed which one it chose
_PUBLIC_ROWS = 5_000  # at most, for priors and controls
_NO_PRIOR = "none"


@dataclass(frozen=True)
class Condition:
    """One column of the grid: ν, over ``rounds`` T rounds of the same rows at the same weights.

    ``local_epsilon`` is the pure price, between any two updates, of one release: set where ν was found from it.
    """

    noise_multiplier: float
    rounds: int
    local_epsilon: float | None = None

    @property
    def is_control(self) -> bool:
        """No noise: whether the audit's own instruments work."""
        return self.noise_multiplier == 0

    @property
    def name(self) -> str:
        """For file names."""
        return f"nu={self.noise_multiplier!r},T={self.rounds}"


@dataclass(frozen=True)
class AuditSettings:
    """Everything that an audit's figures depend on, as the command line has it.

    ``noise_multipliers`` (ν) and ``local_epsilons`` make the grid with ``rounds`` (T); ν = 0 is always added.
    ``attacks`` empty means every attack that applies. ``prior`` names a file of public rows of the same kind, or is
    ``"none"``; None takes the other rows of the audited file. ``layers`` asks for the predictor's word on each layer.
    """

    task: str
    data: Path | None = None
    model: str = "twin"
    init: str = "default"
    trained: Path | None = None
    prior: str | None = None
    images: int = 20
    noise_multipliers: tuple[float, ...] = (0.0, 0.1, 1.0, 3.0, 10.0)
    local_epsilons: tuple[float, ...] = ()
    attacks: tuple[str, ...] = ()
    rounds: tuple[int, ...] = (1,)
    batch_size: int = 1
    local_steps: int = 1
    step_size: float | None = None
    granularity: Granularity = Granularity.LAYER
    layers: bool = True
    neighbourhood: Neighbourhood = Neighbourhood.RELATIVE
    clipping_norm: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("--images", self.images),
            ("--batch", self.batch_size),
            ("--local-steps", self.local_steps),
        ):
            if value < 1:
                raise CoterieError(f"Expected {name} to be at least 1, found {value}")
        if self.images % self.batch_size:
            raise CoterieError(
                f"Expected --images to be a multiple of --batch {self.batch_size}, found {self.images}: "
                f"every batch must be full"
            )
        positive = [
            ("--local-epsilon", self.local_epsilons),
            ("--step-size", (self.step_size,)),
            ("--clipping-norm", (self.clipping_norm,)),
        ]
        for option, numbers in positive:
            for number in numbers:
                if number is not None and not 0 < number < float("inf"):
                    raise CoterieError(f"Expected {option} to be finite and above 0, found {number:g}")
        if wrong := [nu for nu in self.noise_multipliers if not 0 <= nu < float("inf")]:
            raise CoterieError(f"Expected --nu to hold finite numbers of at least 0, found {wrong[0]:g}")
        if not self.rounds or min(self.rounds) < 1:
            raise CoterieError(f"Expected --rounds to hold numbers of at least 1, found {list(self.rounds)}")
        if self.neighbourhood is Neighbourhood.RELATIVE and (self.local_epsilons or self.clipping_norm):
            option = "--local-epsilon" if self.local_epsilons else "--clipping-norm"
            raise CoterieError(
                f"Expected --neighbourhood fixed with {option}, found relative: its noise follows the private update, "
                f"so no radius is clipped to and no ε is guaranteed"
            )
        if self.init not in {"default", "dlg"}:
            raise CoterieError(f"Expected --init to be default or dlg, found {self.init!r}")
        if self.trained is not None and self.init != "default":
            raise CoterieError(
                "Expected either --trained or --init, found both: trained weights need no initialisation"
            )


@dataclass(frozen=True)
class Material:
    """What is attacked: ``batches`` of B rows, and ``pool``, the rows that are nobody's here.

    ``public`` is what the attacker knows of the pool, for priors: None with ``--prior none``. The pool also makes the
    controls and the wrong candidates, which belong to the measuring, whatever the attacker knows.
    """

    settings: AuditSettings
    task: Task
    model: AuditedModel
    batches: tuple[ClientData, ...]
    pool: Rows
    public: Rows | None
    trained: Vector | None
    notes: tuple[str, ...]
    fingerprint: str

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(channels, height, width) of an image, or None for rows of a table."""
        return image_shape(self.model.input_shape)

    def conditions(self) -> tuple[Condition, ...]:
        """The control, then T by ν and by local ε, in the order given. ν = 2n/ε has the local price ε.

        Between any two updates clipped to the radii C_l the loss is at most Σ 2·C_l·ε_l with ε_l = n_l/(ν·C_l).
        """
        settings = self.settings
        found = [(nu, None) for nu in dict.fromkeys(settings.noise_multipliers) if nu > 0]
        budgets = [(2 * self.model.layout.size / e, e) for e in dict.fromkeys(settings.local_epsilons)]
        return (
            Condition(0.0, 1),
            *(Condition(nu, t, epsilon) for t in dict.fromkeys(settings.rounds) for nu, epsilon in (*found, *budgets)),
        )

    def threat(self, condition: Condition, batch: int) -> ThreatModel:
        """What the server knows when it attacks ``batch``."""
        settings = self.settings
        step = self.task.training.step_size if settings.step_size is None else settings.step_size
        threat = threat_for(
            self.model,
            condition.noise_multiplier,
            neighbourhood=settings.neighbourhood,
            clipping_norm=settings.clipping_norm,
            granularity=settings.granularity,
            batch_size=settings.batch_size,
            local_steps=settings.local_steps,
            step_size=step,
            public=self.public,
        )
        rows, _ = self.candidates(batch)
        return threat.knowing(candidates=rows)

    def start(self, batch: int, hypothesis: int = 0) -> Vector:
        """The weights (n,) that the client of ``batch`` was sent: the trained ones, or a fresh start for each."""
        if self.trained is not None and hypothesis == 0:
            return self.trained
        rng = seeded(self.settings.seed, "audit", "start", batch, hypothesis)
        return self.model.initial(self.settings.init, rng=rng)

    def candidates(self, batch: int) -> tuple[Rows, int]:
        """Data sets of B rows, one of them the client's own, and its place among them.

        Row r of every wrong one has the class of the client's row r (any row where targets are no classes), and
        other inputs than it.
        """
        own = self.batches[batch]
        rng = seeded(self.settings.seed, "audit", "candidates", batch)
        others = [self.others(batch, row) for row in range(own.rows)]
        count = min(map(len, others))
        place = int(rng.integers(count + 1))
        wrong = [[rows.inputs[j] for rows in others] for j in range(count)]
        labels = [[rows.targets[j] for rows in others] for j in range(count)]
        inputs = [torch.stack(x) for x in wrong[:place]] + [own.inputs] + [torch.stack(x) for x in wrong[place:]]
        targets = [torch.stack(x) for x in labels[:place]] + [own.targets] + [torch.stack(x) for x in labels[place:]]
        return Rows(torch.stack(inputs), torch.stack(targets)), place

    def others(self, batch: int, row: int) -> Rows:
        """Up to 99 rows of the pool that are of the class of a client's row and differ from it, drawn by the seed."""
        own = self.batches[batch]
        fits = self._differ(own.inputs[row])
        if self.model.classes is not None:
            fits &= self.pool.targets == own.targets[row]
        places = torch.nonzero(fits).flatten().numpy()
        rng = seeded(self.settings.seed, "audit", "others", batch, row)
        chosen = torch.from_numpy(rng.permutation(places)[: CANDIDATES - 1])
        return Rows(self.pool.inputs[chosen], self.pool.targets[chosen])

    def _differ(self, inputs: Tensor) -> Tensor:
        return (self.pool.inputs != inputs).flatten(1).any(dim=1)

    @cached_property
    def class_means(self) -> dict[int, Tensor]:
        """The pool's mean image of each class; everything is class 0 where targets are no classes."""
        classes = (
            self.pool.targets if self.model.classes is not None else torch.zeros(len(self.pool), dtype=torch.int64)
        )
        return {int(c): self.pool.inputs[classes == c].double().mean(dim=0) for c in sorted(set(classes.tolist()))}

    def class_of(self, target: Tensor) -> int:
        """The key of ``class_means``."""
        return int(target) if self.model.classes is not None else 0


def prepare(settings: AuditSettings) -> Material:
    """Read the data, choose the rows, build the model, load what was trained.

    Equal settings and files give equal material, in every process. Raises ``CoterieError`` for data or a model that
    cannot be audited.
    """
    task = load_task(settings.task)
    everything, notes = _read(task, settings.data, "--data")
    own, rest = _choose(everything, settings)
    try:
        model = audited_model(task, own, settings.model)
    except RuntimeError as error:  # torch's, of several lines
        shape, line = tuple(own.inputs.shape[1:]), str(error).splitlines()[0]
        raise CoterieError(
            f"Expected rows that fit model {settings.model!r}, found inputs of shape {shape}: {line}"
        ) from error
    pool, public = rest, rest
    if settings.prior == _NO_PRIOR:
        public = Rows(rest.inputs[:0], rest.targets[:0])
    elif settings.prior is not None:
        known, more = _read(task, Path(settings.prior), "--prior")
        if tuple(known.inputs.shape[1:]) != model.input_shape:
            raise CoterieError(
                f"Expected --prior rows of shape {model.input_shape}, found {tuple(known.inputs.shape[1:])}"
            )
        public, notes = Rows(known.inputs, known.targets), (*notes, *more)
    if model.kinks or (settings.model == "twin" and (kink := _own_kink(task, own))):
        where = model.kinks[0] if model.kinks else kink
        notes = (
            *notes,
            f"the task's own model is not twice differentiable ({where}): "
            + ("attacks that differentiate a gradient are left out" if model.kinks else "its smooth twin is audited"),
        )
    batches = tuple(
        ClientData(
            f"batch {i}",
            own.inputs[first : first + settings.batch_size],
            own.targets[first : first + settings.batch_size],
        )
        for i, first in enumerate(range(0, settings.images, settings.batch_size))
    )
    trained = None if settings.trained is None else _trained(settings, model)
    changed = (
        model.task
        if settings.step_size is None
        else replace(model.task, training=replace(model.task.training, step_size=settings.step_size))
    )
    model = replace(model, task=changed)
    public = Rows(public.inputs[:_PUBLIC_ROWS], public.targets[:_PUBLIC_ROWS])
    return Material(
        settings=settings,
        task=changed,
        model=model,
        batches=batches,
        pool=pool,
        public=public if len(public) else None,
        trained=trained,
        notes=notes,
        fingerprint=_fingerprint(settings, model, batches, pool, public, trained),
    )


def _read(task: Task, path: Path | None, option: str) -> tuple[ClientData, tuple[str, ...]]:
    if task.needs_data and path is None:
        raise CoterieError(f"Expected {option} FILE for task {task.name!r}, found none")
    if path is not None and not path.exists():
        raise CoterieError(f"Expected {option} to name a file, found none at {path}")
    dataset = task.read(DataSource(path, None, 1))
    if path is None and sum(client.rows for client in dataset.clients) < CANDIDATES:
        # A task that deals a few made-up rows to each data holder.
        dataset = task.read(DataSource(None, task.partitions[0], 100))
    clients = [client for client in dataset.clients if client.rows]
    if not clients:
        raise CoterieError(f"Expected at least one row to attack in {path or task.name}, found an empty set")
    inputs = torch.cat([client.inputs for client in clients])
    targets = torch.cat([client.targets for client in clients])
    return ClientData("all", inputs, targets), dataset.notes


def _choose(rows: ClientData, settings: AuditSettings) -> tuple[ClientData, Rows]:
    """The audited rows, and as the pool a seeded choice of the others; each in a seeded order."""
    if settings.images >= rows.rows:
        raise CoterieError(
            f"Expected --images below the {rows.rows} rows that there are (the others are the controls), "
            f"found {settings.images}"
        )
    order = torch.from_numpy(seeded(settings.seed, "audit", "rows").permutation(rows.rows))
    own, rest = order[: settings.images], order[settings.images : settings.images + 4 * _PUBLIC_ROWS]
    chosen = ClientData("audited", rows.inputs[own], rows.targets[own])
    return chosen, Rows(rows.inputs[rest], rows.targets[rest])


def _own_kink(task: Task, rows: ClientData) -> str | None:
    return next(iter(audited_model(task, rows, "task").kinks), None)


def _trained(settings: AuditSettings, model: AuditedModel) -> Vector:
    """The weights of ``--trained``, which may belong to another task if the audited model is not the task's own."""
    path = settings.trained
    assert path is not None
    if settings.model in {"task", "twin"}:
        _, module = load_model(path, task_name=settings.task)
        return from_tensors(dict(module.named_parameters()), model.layout)
    try:
        vector = from_tensors(load_file(path), model.layout)
    except (SafetensorError, OSError) as error:
        raise CoterieError(f"Expected a safetensors model at {path}, found: {error}") from error
    except CoterieError as error:
        raise CoterieError(f"{path}: {error}") from error
    if not np.isfinite(vector).all():
        raise CoterieError(f"Expected finite parameters in {path}, found NaN or infinity")
    return vector


def _fingerprint(
    settings: AuditSettings,
    model: AuditedModel,
    batches: Sequence[ClientData],
    pool: Rows,
    public: Rows,
    trained: Vector | None,
) -> str:
    """Of everything that a cell's figures depend on, except for where in the grid it is."""
    said = {name: str(value) for name, value in fixed_settings(settings).items()}
    clipping = model.task.clipping_norm
    said["clipping norms"] = str(clipping if isinstance(clipping, float | int) else dict(clipping))
    digest = hashlib.sha256(json.dumps([said, model.layout.size], sort_keys=True).encode())
    rows: list[ClientData | Rows] = [*batches, pool, public]
    tensors = [x for one in rows for x in (one.inputs, one.targets)]
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    if trained is not None:
        digest.update(trained.tobytes())
    return digest.hexdigest()


_GRID = {"noise_multipliers", "local_epsilons", "attacks", "rounds", "layers"}  # what a later run may extend


def fixed_settings(settings: AuditSettings) -> dict[str, object]:
    """The settings that all cells of one folder share, as plain values."""
    values = {name: getattr(settings, name) for name in settings.__dataclass_fields__ if name not in _GRID}
    return {
        name: str(value) if isinstance(value, Path) else (value.value if hasattr(value, "value") else value)
        for name, value in values.items()
    }
