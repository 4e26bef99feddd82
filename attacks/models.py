"""The models that are attacked: the task's own or its smooth twin, and the two networks of the literature."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from coterie.attacks.shapes import image_shape
from coterie.attacks.smoothness import kinks, smooth_twin, without_dropout
from coterie.datasets.femnist import CharacterNetwork
from coterie.errors import CoterieError
from coterie.parameters import Layout, layout_of, to_vector
from coterie.protocol import Vector
from coterie.tasks import ClientData, Task, seeded_module

MODELS = ("task", "twin", "lenet", "cnn")


class LeNet(nn.Module):
    """The network of the published DLG attacks: three 5×5 convolutions of 12 channels with sigmoids, one dense layer.

    Strides 2, 2, 1 and padding 2 (Zhu et al. 2019, reference code): 28×28 pixels become 12·7·7 = 588 features.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.shape = shape
        self.convolution1 = nn.Conv2d(channels, 12, 5, stride=2, padding=2)
        self.convolution2 = nn.Conv2d(12, 12, 5, stride=2, padding=2)
        self.convolution3 = nn.Conv2d(12, 12, 5, stride=1, padding=2)
        self.output = nn.Linear(12 * -(-height // 4) * -(-width // 4), classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """(rows, …) → (rows, classes)."""
        maps = torch.sigmoid(self.convolution1(inputs.view(-1, *self.shape)))  # (rows, 12, h/2, w/2)
        maps = torch.sigmoid(self.convolution2(maps))  # (rows, 12, h/4, w/4)
        maps = torch.sigmoid(self.convolution3(maps))
        outputs: Tensor = self.output(maps.flatten(1))
        return outputs


@dataclass(frozen=True)
class AuditedModel:
    """A model with its task: the client trains ``task.build()`` in float32, attacks use ``module`` in float64.

    ``classes`` is the number of classes, None for a task of real targets. ``kinks`` says where the model is not twice
    differentiable (empty: every attack applies). ``dense_first_layer`` is the layer whose weights meet the raw
    inputs, if it is fully connected with a bias. ``input_shape`` is that of one row.
    """

    name: str
    task: Task
    module: nn.Module
    layout: Layout
    input_shape: tuple[int, ...]
    classes: int | None
    kinks: tuple[str, ...]
    dense_first_layer: str | None

    def initial(self, how: str, *, rng: np.random.Generator) -> Vector:
        """A random start (n,): ``"default"`` as the task initialises a hypothesis, ``"dlg"`` U(−½, ½) everywhere.

        U(−½, ½) is what the published DLG attacks use (Zhu et al. 2019, reference code).
        """
        if how == "dlg":
            return rng.uniform(-0.5, 0.5, self.layout.size).astype(np.float32)
        if how != "default":
            raise CoterieError(f"Expected initialisation default or dlg, found {how!r}")
        return to_vector(self.task.initialise(rng))


def audited_model(task: Task, sample: ClientData, name: str = "twin") -> AuditedModel:
    """The model ``name`` of ``MODELS`` for a task, whose shapes are taken from ``sample`` (any of its rows).

    - ``task``: the task's own, with dropout off. Attacks that differentiate a gradient refuse it if it has kinks.
    - ``twin``: the task's own with sigmoids and averaging in place of what has no second derivative.
    - ``lenet``: ``LeNet`` for the task's images and classes.
    - ``cnn``: the smooth twin of FEMNIST's 1,206,590-parameter network (62 outputs, 28×28 grey images).

    Raises ``CoterieError`` for an unknown name, rows that do not fit, and a twin that still has kinks.
    """
    if sample.rows == 0:
        raise CoterieError("Expected at least one row to attack, found an empty set")
    classes = _classes(task, sample)
    build, initialise = _builders(task, sample, name, classes)
    changed = replace(task, build=build, initialise=initialise)
    if name in {"lenet", "cnn"}:
        changed = replace(changed, clipping_norm=1.0)
    module = build().double()
    try:
        found = kinks(module, sample.inputs[:1].double())
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise CoterieError(
            f"Expected rows that fit model {name!r}, found inputs of shape {tuple(sample.inputs.shape[1:])}: {line}"
        ) from error
    if found and name != "task":
        raise CoterieError(f"Expected a smooth model, found {found[0]}, which has no smooth twin: replace it")
    with torch.no_grad():
        outputs = module(sample.inputs[:1].double())
    return AuditedModel(
        name=name,
        task=changed,
        module=module,
        layout=layout_of(module),
        input_shape=tuple(sample.inputs.shape[1:]),
        classes=None if classes is None else int(outputs.shape[-1]),
        kinks=found,
        dense_first_layer=_dense_first_layer(module, sample.inputs[:1].double()),
    )


def _classes(task: Task, sample: ClientData) -> int | None:
    """The number of classes, by the task's own model's outputs; None when the targets are not class numbers."""
    if sample.targets.dtype != torch.int64 or sample.targets.ndim != 1:
        return None
    module = without_dropout(task.build())
    with torch.no_grad():
        return int(module(sample.inputs[:1]).shape[-1])


def _builders(
    task: Task, sample: ClientData, name: str, classes: int | None
) -> tuple[Callable[[], nn.Module], Callable[[np.random.Generator], nn.Module]]:
    if name in {"task", "twin"}:
        change = smooth_twin if name == "twin" else without_dropout
        return (lambda: change(task.build())), (lambda rng: change(task.initialise(rng)))
    if name not in MODELS:
        raise CoterieError(f"Expected model to be one of {', '.join(MODELS)}, found {name!r}")
    shape = image_shape(tuple(sample.inputs.shape[1:]))
    if shape is None or classes is None:
        raise CoterieError(
            f"Expected a task of image classification for model {name!r}, found inputs of shape "
            f"{tuple(sample.inputs.shape[1:])}, {classes or 'no'} classes: choose model task or twin"
        )
    if name == "cnn" and (tuple(sample.inputs.shape[1:]) != (1, 28, 28) or classes > 62):
        raise CoterieError(f"Expected 28×28 grey images and at most 62 classes for model cnn, found {shape}, {classes}")
    built: Callable[[], nn.Module] = (
        (lambda: LeNet(shape, classes)) if name == "lenet" else (lambda: smooth_twin(CharacterNetwork()))
    )
    return built, (lambda rng: seeded_module(built, rng))


def _dense_first_layer(module: nn.Module, inputs: Tensor) -> str | None:
    seen: list[tuple[str, nn.Module, Tensor]] = []
    handles = [
        layer.register_forward_pre_hook(lambda m, args, name=name: seen.append((name, m, args[0])))
        for name, layer in module.named_modules()
        if any(True for _ in layer.parameters(recurse=False))
    ]
    with torch.no_grad():
        module(inputs)
    for handle in handles:
        handle.remove()
    name, layer, entered = seen[0]
    is_dense = isinstance(layer, nn.Linear) and layer.bias is not None
    return name if is_dense and torch.equal(entered.reshape(-1), inputs.reshape(-1)) else None
