"""What is not twice differentiable is found wherever it is, and replaced."""

import pytest
import torch
from torch import Tensor, nn

from coterie.attacks.models import audited_model
from coterie.attacks.smoothness import kinks, smooth_twin, without_dropout
from coterie.errors import CoterieError
from coterie.tasks import ClientData, Task, load_task


class Inline(nn.Module):
    """Rectifies, pools and drops in ``forward``, where no layer shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3)
        self.second = nn.Linear(2 * 3 * 3, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = nn.functional.max_pool2d(nn.functional.relu(self.first(inputs)), 2)
        return self.second(nn.functional.dropout(maps, 0.5, self.training).flatten(1))


IMAGES = torch.rand((5, 1, 8, 8), generator=torch.Generator().manual_seed(0))


def test_kinks_are_named_with_their_layer() -> None:
    assert kinks(Inline(), IMAGES) == ("relu at 'first' (Conv2d)", "max_pool2d at 'first' (Conv2d)")


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.ReLU(), "relu at '1' (ReLU)"),
        (nn.ReLU(inplace=True), "relu at '1' (ReLU)"),
        (nn.LeakyReLU(), "leaky_relu at '1' (LeakyReLU)"),
        (nn.Hardtanh(), "hardtanh at '1' (Hardtanh)"),
        (nn.ELU(), "elu at '1' (ELU)"),
    ],
)
def test_layers_are_found(layer: nn.Module, name: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), layer)
    assert kinks(module, IMAGES) == (name,)
    assert kinks(smooth_twin(module), IMAGES) == ()


def test_smooth_models_have_no_kinks() -> None:
    assert kinks(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.GELU(), nn.Softplus()), IMAGES) == ()


def test_the_twin_computes_with_sigmoids_and_averages() -> None:
    module = Inline()
    twin = smooth_twin(module)
    maps = nn.functional.avg_pool2d(torch.sigmoid(module.first(IMAGES)), 2)
    torch.testing.assert_close(twin(IMAGES), module.second(maps.flatten(1)))
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert kinks(module, IMAGES)  # the original is as it was


def test_dropout_does_nothing() -> None:
    module = without_dropout(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))).train()
    torch.testing.assert_close(module(IMAGES), module[0](IMAGES))
    assert not torch.equal(nn.Sequential(module[0], nn.Dropout(0.5)).train()(IMAGES), module[0](IMAGES))


def task_of(build: type[nn.Module]) -> Task:
    from dataclasses import replace

    return replace(load_task("digits"), name="own:task", build=build, initialise=lambda rng: build())


def test_a_users_own_model_is_audited_by_its_twin() -> None:
    sample = ClientData("x", IMAGES, torch.zeros(5, dtype=torch.int64))
    assert audited_model(task_of(Inline), sample, "task").kinks
    twin = audited_model(task_of(Inline), sample, "twin")
    assert (twin.kinks, twin.classes, twin.layout.size) == ((), 4, 20 + 76)


def test_what_has_no_twin_is_an_error() -> None:
    class Absolute(Inline):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs).abs()

    sample = ClientData("x", IMAGES, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(CoterieError, match=r"Expected a smooth model, found abs at 'second' \(Linear\)"):
        audited_model(task_of(Absolute), sample, "twin")


def test_the_networks_of_the_literature_have_their_sizes() -> None:
    """LeNet: 12·25 + 12, twice 12·12·25 + 12, 588·62 + 62; the FEMNIST network: the paper's 1,206,590."""
    sample = ClientData("x", torch.zeros(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64))
    femnist = load_task("femnist")
    lenet, cnn = audited_model(femnist, sample, "lenet"), audited_model(femnist, sample, "cnn")
    assert lenet.layout.size == 312 + 2 * 3612 + 588 * 62 + 62
    assert cnn.layout.size == 1_206_590
    assert (lenet.kinks, cnn.kinks) == ((), ())
    assert [layer.name for layer in cnn.layout.layers] == ["convolution1", "convolution2", "hidden", "output"]


def test_models_that_do_not_fit_are_refused() -> None:
    flat = ClientData("x", torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(CoterieError, match="Expected 28×28 grey images"):
        audited_model(load_task("digits"), flat, "cnn")
    with pytest.raises(CoterieError, match="Expected model to be one of task, twin, lenet, cnn, found 'resnet'"):
        audited_model(load_task("digits"), flat, "resnet")
    table = ClientData("x", torch.zeros(1, 3), torch.zeros(1, 1))
    with pytest.raises(CoterieError, match="no classes: choose model task or twin"):
        audited_model(load_task("hospital"), table, "lenet")
    wide = ClientData("x", torch.zeros(1, 4), torch.zeros(1, 1))
    with pytest.raises(CoterieError, match="Expected rows that fit model 'task'"):
        audited_model(load_task("hospital"), wide, "task")
