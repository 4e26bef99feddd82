"""Losses and scores, one value a row, as a ``Task`` asks for them."""

import torch
from torch import Tensor, nn


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """‖output − target‖² of each row: (rows, values) × (rows, values) → (rows,)."""
    return (outputs - targets).square().sum(dim=-1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(output)[target] of each row: (rows, classes) × (rows,) → (rows,)."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest output is the target's class, else 0: (rows, classes) × (rows,) → (rows,)."""
    return (outputs.argmax(dim=-1) == targets).to(torch.float32)


def as_percent(fraction: float) -> float:
    """A fraction as a percentage."""
    return 100.0 * fraction
