"""A model's parameters as one flat vector, with a public layout of layers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.errors import CoterieError


@dataclass(frozen=True)
class Entry:
    """One parameter tensor's place in the flat vector: ``vector[start:stop].reshape(shape)``."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Layer:
    """One layer's contiguous slice: all the parameter tensors of one module (weight and bias together)."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """n_l, the number of the layer's parameters."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Names, shapes and slices of a model's parameters, in ``named_parameters`` order."""

    entries: tuple[Entry, ...]
    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        """n, the length of the flat vector."""
        return self.entries[-1].stop


def layout_of(module: nn.Module) -> Layout:
    """The layout of a module's parameters.

    Raises ``CoterieError`` for a module without parameters, with buffers (batch statistics would leave un-noised
    or be lost), or whose layers are not contiguous.
    """
    if (buffer := next((name for name, _ in module.named_buffers()), None)) is not None:
        raise CoterieError(
            f"Expected a model without buffers, found {buffer!r}: use GroupNorm or LayerNorm, not BatchNorm"
        )
    entries: list[Entry] = []
    layers: list[Layer] = []
    start = 0
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise CoterieError(f"Expected every parameter to be trained, found {name!r} frozen: make it a constant")
        stop = start + parameter.numel()
        entries.append(Entry(name, tuple(parameter.shape), start, stop))
        layer = name.rpartition(".")[0] or name
        if layers and layers[-1].name == layer:
            layers[-1] = Layer(layer, layers[-1].start, stop)
        elif any(known.name == layer for known in layers):
            raise CoterieError(f"Expected the parameters of layer {layer!r} side by side, found them apart")
        else:
            layers.append(Layer(layer, start, stop))
        start = stop
    if not entries:
        raise CoterieError("Expected a model with parameters, found none")
    return Layout(tuple(entries), tuple(layers))


def to_vector(module: nn.Module) -> NDArray[np.float32]:
    """A copy of the module's parameters as one float32 vector of shape (n,)."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).to(torch.float32).numpy().copy()


def as_tensors(vector: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Views of ``vector`` (n,) as named tensors, for ``torch.func.functional_call``."""
    return {entry.name: vector[entry.start : entry.stop].view(entry.shape) for entry in layout.entries}


def from_tensors(tensors: Mapping[str, Tensor], layout: Layout) -> NDArray[np.float32]:
    """The flat float32 vector of named tensors. Raises ``CoterieError`` for a missing name or another shape."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {entry.name: entry.shape for entry in layout.entries}
    if found != expected:
        raise CoterieError(f"Expected parameters {expected}, found {found}: was the model saved for another task?")
    parts = [tensors[entry.name].detach().reshape(-1) for entry in layout.entries]
    return torch.cat(parts).to(torch.float32).numpy().copy()
