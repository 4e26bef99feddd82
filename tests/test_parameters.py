"""A model as one flat vector: there and back, and what cannot be one."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from coterie.errors import CoterieError
from coterie.parameters import as_tensors, from_tensors, layout_of, to_vector


def small() -> nn.Module:
    torch.manual_seed(0)
    parts = [("conv", nn.Conv2d(1, 2, 3)), ("flat", nn.Flatten()), ("head", nn.Linear(8, 3, bias=False))]
    return nn.Sequential(OrderedDict(parts))


def test_weight_and_bias_of_a_module_are_one_layer() -> None:
    layout = layout_of(small())
    assert [(layer.name, layer.start, layer.stop, layer.size) for layer in layout.layers] == [
        ("conv", 0, 20, 20),
        ("head", 20, 44, 24),
    ]
    assert [(entry.name, entry.shape) for entry in layout.entries] == [
        ("conv.weight", (2, 1, 3, 3)),
        ("conv.bias", (2,)),
        ("head.weight", (3, 8)),
    ]
    assert layout.size == 44 == sum(layer.size for layer in layout.layers)


def test_the_vector_is_the_models_parameters_in_layout_order() -> None:
    model = small()
    vector, layout = to_vector(model), layout_of(model)
    assert (vector.dtype, vector.shape) == (np.float32, (44,))
    for entry, (name, parameter) in zip(layout.entries, model.named_parameters(), strict=True):
        assert entry.name == name
        np.testing.assert_array_equal(vector[entry.start : entry.stop], parameter.detach().numpy().reshape(-1))


def test_a_model_computes_the_same_from_its_vector() -> None:
    model, inputs = small(), torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    tensors = as_tensors(torch.from_numpy(to_vector(model)), layout_of(model))
    torch.testing.assert_close(functional_call(model, tensors, (inputs,)), model(inputs))


def test_the_vector_is_a_copy_and_tensors_are_views() -> None:
    model = small()
    vector = to_vector(model)
    vector[:] = 7
    assert not (next(model.parameters()) == 7).any()
    flat = torch.zeros(44)
    as_tensors(flat, layout_of(model))["conv.bias"].fill_(3)
    assert flat[18:20].tolist() == [3, 3]
    assert flat.sum() == 6


def test_there_and_back() -> None:
    model = small()
    layout, vector = layout_of(model), to_vector(model)
    np.testing.assert_array_equal(from_tensors(as_tensors(torch.from_numpy(vector), layout), layout), vector)
    backwards = dict(reversed(model.state_dict().items()))
    np.testing.assert_array_equal(from_tensors(backwards, layout), vector)  # by name, not by order


@pytest.mark.parametrize("damage", ["missing", "more", "shape"])
def test_other_tensors_are_refused(damage: str) -> None:
    model = small()
    tensors = dict(model.state_dict())
    if damage == "missing":
        del tensors["conv.bias"]
    elif damage == "more":
        tensors["extra"] = torch.zeros(1)
    else:
        tensors["conv.bias"] = torch.zeros(1, 2)
    with pytest.raises(CoterieError, match="another task"):
        from_tensors(tensors, layout_of(model))


def test_tied_parameters_are_one_entry_and_both_follow_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(self.a(x))
            return out

    model = Tied()
    layout = layout_of(model)
    assert layout.size == to_vector(model).size == 4
    doubled = as_tensors(2 * torch.eye(2).reshape(-1), layout)
    torch.testing.assert_close(functional_call(model, doubled, (torch.eye(2),)), 4 * torch.eye(2))


def test_batch_norm_is_refused_by_name() -> None:
    # Its running statistics are of private data, and are no parameters: they would leave un-noised or be lost.
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(CoterieError, match=r"'1\.running_mean'.*GroupNorm"):
        layout_of(model)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(CoterieError, match="found none"):
        layout_of(nn.ReLU())


def test_a_layer_in_two_places_is_refused() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Module()
            self.outer.scale = nn.Parameter(torch.ones(1))
            self.outer.inner = nn.Linear(1, 1)
            self.between = nn.Linear(1, 1)
            self.register_module("again", self.outer)

    split = Split()
    assert [layer.name for layer in layout_of(split).layers] == ["outer", "outer.inner", "between"]

    class Apart(nn.Module):
        def named_parameters(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
            yield from [(name, nn.Parameter(torch.ones(1))) for name in ("a.weight", "b.weight", "a.bias")]

    with pytest.raises(CoterieError, match="'a' side by side"):
        layout_of(Apart())


def test_a_parameter_of_the_model_itself_is_a_layer_of_its_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.ones(2))
            self.shift = nn.Parameter(torch.ones(1))

    assert [(layer.name, layer.size) for layer in layout_of(Bare()).layers] == [("slope", 2), ("shift", 1)]
