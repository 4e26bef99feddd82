"""Images with their channels innermost in memory, which is how convolutions are fastest on a CPU.

Only the order in memory changes, so that results are the same up to the rounding of sums taken in another order.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coterie.parameters import Layout

# Calls that draw numbers in the order in which their input lies in memory.
_DRAWING = {
    functional.dropout,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    functional.rrelu,
    torch.bernoulli,
    torch.rand_like,
    torch.randn_like,
}


def has_convolutions(layout: Layout) -> bool:
    """Whether a model has parameters of four dimensions, as convolutions of images have."""
    return any(len(entry.shape) == 4 for entry in layout.entries)


class ChannelsLast(TorchFunctionMode):
    """While it is entered, two-dimensional convolutions and what follows them keep channels innermost.

    What a model draws for dropout falls on the same numbers of an image as without it. A draw by a call that is not
    in ``_DRAWING`` has the same law, but falls on others.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func``; torch calls this in place of every operation."""
        if func is torch.conv2d:
            args = (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
        elif func in _DRAWING:
            args = (args[0].contiguous(), *args[1:])
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.requires_grad and _channels_innermost(result):
            # Where a flattening follows, the gradient comes back in the other order, and pooling then takes seven
            # times as long.
            result.register_hook(_channels_last)  # type: ignore[no-untyped-call]
        return result


def _channels_last(gradient: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)


def _channels_innermost(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
