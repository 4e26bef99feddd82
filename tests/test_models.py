import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from coterie.errors import CoterieError
from coterie.models import FORMAT, load_model, save_model
from coterie.parameters import Layout, layout_of, to_vector
from coterie.tasks import Task, load_task


@pytest.fixture
def hospital() -> Task:
    return load_task("hospital")


@pytest.fixture
def layout(hospital: Task) -> Layout:
    return layout_of(hospital.build())


VECTOR = np.linspace(-1, 1, 11, dtype=np.float32)


def test_what_is_saved_is_loaded(tmp_path: Path, layout: Layout) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, "hospital", VECTOR, layout, {"client": "provider-010001"})
    task, module = load_model(path)
    assert task.name == "hospital"
    assert to_vector(module).tolist() == VECTOR.tolist()
    assert not module.training
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_file_holds_parameter_names_and_metadata(tmp_path: Path, layout: Layout) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, "hospital", VECTOR, layout, {"client": "provider-010001"})
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"task": "hospital", "format": "coterie-model-1", "client": "provider-010001"}
        assert file.get_tensor("hidden.bias").tolist() == VECTOR[6:8].tolist()


def test_only_the_owner_may_read_it(tmp_path: Path, layout: Layout) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, "hospital", VECTOR, layout)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failed_save_leaves_the_old_file_whole(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, "hospital", VECTOR, layout)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CoterieError, match=f"Expected to write the model to {path}, found: .*No space left"):
        save_model(path, "hospital", 2 * VECTOR, layout)
    monkeypatch.undo()
    assert to_vector(load_model(path)[1]).tolist() == VECTOR.tolist()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_vector_of_another_length_is_refused(tmp_path: Path, layout: Layout) -> None:
    with pytest.raises(CoterieError, match=r"shape \(11,\) to save, found \(12,\)"):
        save_model(tmp_path / "m", "hospital", np.zeros(12, np.float32), layout)
    with pytest.raises(CoterieError, match="Expected to write the model"):
        save_model(tmp_path / "nope" / "m", "hospital", VECTOR, layout)


def test_files_that_are_no_model_of_ours(tmp_path: Path, layout: Layout) -> None:
    with pytest.raises(CoterieError, match=r"Expected a model file at .*nope, found none"):
        load_model(tmp_path / "nope")
    with pytest.raises(CoterieError, match="found a folder"):
        load_model(tmp_path)
    path = tmp_path / "m"
    path.write_bytes(b"nonsense")
    with pytest.raises(CoterieError, match=f"Expected a safetensors model at {path}"):
        load_model(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CoterieError, match=r"format coterie-model-1.*found format 'unknown'"):
        load_model(path)
    save_file({"x": torch.zeros(1)}, path, {"format": FORMAT, "task": "hospital"})
    with pytest.raises(CoterieError, match="another task"):
        load_model(path)
    save_model(path, "digits", VECTOR, layout)
    with pytest.raises(CoterieError, match="another task"):
        load_model(path)
    save_model(path, "hospital", np.full(11, np.nan, np.float32), layout)
    with pytest.raises(CoterieError, match=f"Expected finite parameters in {path}"):
        load_model(path)


def test_a_model_file_does_not_choose_code_to_import(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_task.py").write_text(
        "import os\nos.environ['OWN_TASK_RAN'] = 'yes'\nfrom coterie.datasets.hospital import task\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OWN_TASK_RAN", "no")
    path = tmp_path / "m"
    save_model(path, "own_task:task", VECTOR, layout)
    with pytest.raises(CoterieError, match="found 'own_task:task'; name it with --task own_task:task if you trust"):
        load_model(path)
    assert os.environ["OWN_TASK_RAN"] == "no"
    assert to_vector(load_model(path, task_name="own_task:task")[1]).tolist() == VECTOR.tolist()
    assert os.environ["OWN_TASK_RAN"] == "yes"
    with pytest.raises(CoterieError, match=r"Expected a model of task hospital at .*found 'own_task:task'"):
        load_model(path, task_name="hospital")
