"""Which parts of a model are not twice differentiable, and the smooth twin with the same parameters.

An attack that matches gradients differentiates a gradient. Where the model has a ReLU or a max-pool the second
derivative is zero or missing, and the attack fails for a reason that has nothing to do with privacy; the papers
attack the twin with sigmoids instead (Zhu et al. 2019; arXiv 2206.03396, section 5.3), and so do we.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coterie.errors import CoterieError

AnyModule = TypeVar("AnyModule", bound=nn.Module)

_RECTIFIERS = frozenset(
    "relu relu6 leaky_relu prelu rrelu elu selu celu threshold hardtanh hardsigmoid hardswish".split()  # noqa: SIM905
)
_MAX_POOLS: Mapping[str, Callable[..., Tensor]] = {
    "max_pool1d": functional.avg_pool1d,
    "max_pool2d": functional.avg_pool2d,
    "max_pool3d": functional.avg_pool3d,
}
_ADAPTIVE_MAX_POOLS: Mapping[str, Callable[..., Tensor]] = {
    "adaptive_max_pool1d": functional.adaptive_avg_pool1d,
    "adaptive_max_pool2d": functional.adaptive_avg_pool2d,
    "adaptive_max_pool3d": functional.adaptive_avg_pool3d,
}
_OTHER_KINKS = frozenset(
    "abs absolute clamp clip max amax maximum min amin minimum hardshrink softshrink sign round floor ceil".split()  # noqa: SIM905
)
_DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout".split()  # noqa: SIM905
)


def _name(function: Callable[..., Any]) -> str:
    """The function's plain name, without what marks inner, in-place and index-returning versions of it."""
    return getattr(function, "__name__", "").strip("_").removesuffix("_with_indices")


class _Watch(TorchFunctionMode):
    """Notes every function that is not twice differentiable, and the layer that ran before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = "the inputs"
        self.found: list[tuple[str, str]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        if name in _RECTIFIERS or name in _MAX_POOLS or name in _ADAPTIVE_MAX_POOLS or name in _OTHER_KINKS:
            self.found.append((name, self.layer))
            with torch._C.DisableTorchFunction():  # max_pool2d calls itself by an inner name
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Replace(TorchFunctionMode):
    """Runs dropout as identity and, when asked, rectifiers as sigmoids and max-pooling as averaging."""

    def __init__(self, *, smooth: bool) -> None:
        super().__init__()
        self.smooth = smooth

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, named = _name(func), dict(kwargs or {})
        if name in _DROPOUTS:
            return args[0] if args else named["input"]
        if self.smooth and name in _RECTIFIERS:
            return torch.sigmoid(args[0] if args else named["input"])
        if self.smooth and name in _MAX_POOLS:
            return _averaged(_MAX_POOLS[name], args, named)
        if self.smooth and name in _ADAPTIVE_MAX_POOLS:
            return _ADAPTIVE_MAX_POOLS[name](*args[:2], **{k: v for k, v in named.items() if k != "return_indices"})
        return func(*args, **named)


def _averaged(pool: Callable[..., Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    given = {**dict(zip(names, args, strict=False)), **named}
    if given.get("dilation", 1) not in {1, (1,), (1, 1), (1, 1, 1)} or given.get("return_indices"):
        raise CoterieError("Expected max-pooling without dilation or indices for a smooth twin, found one with them")
    shared = ("kernel_size", "stride", "padding", "ceil_mode")
    return pool(given["input"], **{name: given[name] for name in shared if given.get(name) is not None})


@contextmanager
def _watched(module: nn.Module) -> Iterator[_Watch]:
    watch = _Watch()

    def entered(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, *_: Any) -> None:
            watch.layer = f"{name!r} ({type(layer).__name__})"

        return hook

    # A module without parameters, such as nn.ReLU, is itself where the kink is: named before it runs.
    handles = [
        layer.register_forward_hook(entered(name))
        if any(True for _ in layer.parameters(recurse=False))
        else layer.register_forward_pre_hook(entered(name))
        for name, layer in module.named_modules()
        if name and not any(True for _ in layer.children())
    ]
    try:
        with watch:
            yield watch
    finally:
        for handle in handles:
            handle.remove()


def kinks(module: nn.Module, inputs: Tensor) -> tuple[str, ...]:
    """Where the model is not twice differentiable, one phrase each: ``"relu at 'convolution1' (Conv2d)"``.

    Found by running ``inputs`` (rows, …) through it and watching torch's functions, so that calls from inside
    ``forward`` are seen as well as layers. Empty for a smooth model.
    """
    with torch.no_grad(), _watched(module) as watch:
        module(inputs)
    return tuple(f"{function} at {layer}" for function, layer in watch.found)


def _running(module: AnyModule, *, smooth: bool) -> AnyModule:
    original = type(module)

    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        with _Replace(smooth=smooth):
            return original.forward(self, *args, **named)

    twin = copy.deepcopy(module)
    twin.__class__ = type(original.__name__, (original,), {"forward": forward})
    return twin


def without_dropout(module: AnyModule) -> AnyModule:
    """A copy with the same parameters whose dropout does nothing.

    A random mask is noise that the server does not know; an audit that relied on it would be of luck.
    """
    return _running(module, smooth=False)


def smooth_twin(module: AnyModule) -> AnyModule:
    """A copy with the same parameters and names, where rectifiers are sigmoids, max-pooling is averaging, and
    dropout does nothing.

    Its updates are not those of the original: the audit then speaks of the twin, and says so. Other functions that
    are not twice differentiable (``abs``, ``clamp``, ``max`` …) have no twin: ``kinks`` of the result names them.
    """
    return _running(module, smooth=True)
