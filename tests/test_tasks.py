from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.errors import CoterieError
from coterie.parameters import layout_of, to_vector
from coterie.tasks import BUILT_IN, Task, load_task


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_task_is_sound(name: str) -> None:
    task = load_task(name)
    assert task.name == name
    layout = layout_of(task.build())
    hypotheses = [task.initialise(np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert layout_of(hypotheses[0]) == layout
    first, again, other = (to_vector(module) for module in hypotheses)
    assert np.array_equal(first, again)  # the generator decides …
    assert not np.array_equal(first, other)  # … and nothing else
    if not isinstance(task.clipping_norm, float):
        assert set(task.clipping_norm) == {layer.name for layer in layout.layers}
    norms = [task.clipping_norm] if isinstance(task.clipping_norm, float) else task.clipping_norm.values()
    assert all(norm > 0 for norm in norms)
    assert task.partitions


@pytest.mark.parametrize("name", BUILT_IN)
def test_initial_weights_leave_torch_s_global_generator_alone(name: str) -> None:
    task = load_task(name)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    task.initialise(np.random.default_rng(0))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["hospitl", "", "a.b", ":task", "a:", "a..b:c", "a b:c", ".a:b"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(CoterieError, match="one of synthetic, digits, hospital, femnist, mnist or package"):
        load_task(name)


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(CoterieError, match="did you mean 'hospital'"):
        load_task("hospitl")


def test_a_task_of_the_user_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_ward.py").write_text("from coterie.datasets.digits import task\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(load_task("my_ward:task"), Task)
    with pytest.raises(CoterieError, match=r"'my_ward:number' to be a coterie.tasks.Task, found int"):
        load_task("my_ward:number")
    with pytest.raises(CoterieError, match="no attribute 'nope'"):
        load_task("my_ward:nope")
    with pytest.raises(CoterieError, match="No module named 'my_word'; is its folder on PYTHONPATH"):
        load_task("my_word:task")


def test_a_task_is_a_value() -> None:
    task = load_task("digits")
    assert replace(task, clipping_norm=0.5).clipping_norm == 0.5
    assert task.clipping_norm == 2.0
