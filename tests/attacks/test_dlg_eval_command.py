"""``dlg-eval`` as its users run it: what it writes, and one clear line for each mistake."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from coterie.attacks.command import attack
from coterie.cli import application
from coterie.datasets.digits import task as digits
from coterie.errors import CoterieError
from coterie.tasks import ClientData, Dataset, DataSource, Task, seeded_module

HERE = Path(__file__).parent


class Rectified(nn.Module):
    """A dense layer, a rectifier, a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 8)
        self.output = nn.Linear(8, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """(rows, 64) → (rows, 10)."""
        outputs: Tensor = self.output(torch.relu(self.hidden(inputs)))
        return outputs


def _task(**changes: object) -> Task:
    values = {**vars(digits), "build": Rectified, "initialise": lambda rng: seeded_module(Rectified, rng), **changes}
    return Task(**values)  # type: ignore[arg-type]


def _nobody(source: DataSource) -> Dataset:
    return Dataset((ClientData("nobody", torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64)),))


def _wide(source: DataSource) -> Dataset:
    rng = np.random.default_rng(0)
    inputs = torch.tensor(rng.random((200, 81)), dtype=torch.float32)
    return Dataset((ClientData("wide", inputs, torch.arange(200) % 10),))


rectified = _task()
empty = _task(read=_nobody)
wide = _task(read=_wide)
HERE_TASK = f"{__name__}:"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "audited_tasks", sys.modules[__name__])


def dlg_eval(*arguments: str) -> str:
    """Run it in this process; returns standard output, raises what ``terminal.run`` turns into one line."""
    import typer

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(attack)
    result = CliRunner().invoke(command, [*arguments, "--workers", "1"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_digits_are_audited_without_any_download(tmp_path: Path) -> None:
    out = tmp_path / "audit"
    said = dlg_eval(
        "--task", "digits", "--nu", "0,1", "--attacks", "box,label", "--images", "3", "--json", "--out", str(out)
    )
    results = json.loads(said)
    assert results == json.loads((out / "results.json").read_text())
    assert results["format"] == "coterie-audit-1"
    assert results["verdict"]["valid"] is True
    assert {(cell["attack"], cell["noise_multiplier"]) for cell in results["cells"]} == {
        (name, nu) for name in ("box", "label") for nu in (0.0, 1.0)
    }
    assert {layer["layer"] for layer in results["layers"]} == {"linear", "all", "none"}
    report = (out / "report.html").read_text()
    pictures = sorted(path.name for path in out.glob("*.png"))
    assert "images-box-T1.png" in pictures
    assert report.count("data:image/png;base64,") == len(pictures)
    assert 'src="http' not in report
    assert "<link" not in report


def test_the_table_and_the_verdict_are_printed(tmp_path: Path) -> None:
    said = dlg_eval("--task", "digits", "--nu", "100", "--attacks", "label", "--images", "3", "--out", str(tmp_path))
    assert "class" in said
    assert "label" in said
    assert "95 %" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nu", "-1"], "Expected --nu to hold finite numbers of at least 0, found -1"),
        (["--nu", "one"], "Expected --nu to hold numbers such as 1,10, found 'one'"),
        (["--nu", "nan"], "Expected --nu to hold finite numbers of at least 0, found nan"),
        (["--attacks", "idgl"], "found 'idgl'; did you mean 'idlg'"),
        (["--task", "digit"], "found 'digit'; did you mean 'digits'"),
        (["--images", "0"], "Expected --images to be at least 1, found 0"),
        (["--images", "9999"], "Expected --images below the 1797 rows"),
        (["--images", "3", "--batch", "2"], "Expected --images to be a multiple of --batch 2, found 3"),
        (["--rounds", "0"], "Expected --rounds to hold numbers of at least 1"),
        (["--rounds", "1.5"], "Expected --rounds to hold whole numbers"),
        (["--workers", "0"], "Expected --workers to be at least 1, found 0"),
        (["--local-epsilon", "1"], "Expected --neighbourhood fixed with --local-epsilon"),
        (["--clipping-norm", "1"], "Expected --neighbourhood fixed with --clipping-norm"),
        (["--model", "lenett"], "Expected model to be one of"),
        (["--init", "zeros"], "Expected --init to be default or dlg, found 'zeros'"),
        (["--trained", "none.safetensors"], "Expected a model file at none.safetensors, found none"),
        (["--prior", "absent.npz"], "Expected --prior to name a file, found none at absent.npz"),
        (["--task", "femnist"], "Expected --data FILE for task 'femnist', found none"),
        (["--attacks", "idlg", "--images", "4", "--batch", "2"], "a batch of one row"),
    ],
)
def test_a_mistake_is_one_clear_line_before_any_work(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    defaults = {"--task": "digits", "--out": str(tmp_path / "out"), "--images": "2"}
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    flat = [part for pair in {**defaults, **given}.items() for part in pair]
    with pytest.raises(CoterieError) as error:
        dlg_eval(*flat) if "--workers" not in given else _with_workers(flat)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / "cells").exists()


def _with_workers(arguments: list[str]) -> None:
    import typer

    command = typer.Typer(pretty_exceptions_enable=False)
    command.command()(attack)
    CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_the_folder_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(CoterieError, match="Expected --out to be a folder, found a file"):
        dlg_eval("--task", "digits", "--out", str(path))


def test_a_model_with_a_kink_names_the_layer_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"relu at 'hidden'.*smooth twin"):
        dlg_eval(
            "--task", "audited_tasks:rectified", "--model", "task", "--attacks", "idlg", "--out", str(tmp_path / "out")
        )


def test_a_users_task_is_audited_as_its_smooth_twin(tmp_path: Path) -> None:
    said = dlg_eval(
        "--task", "audited_tasks:rectified", "--attacks", "label", "--nu", "1", "--images", "2", "--json",
        "--no-layers", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert any("its smooth twin is audited" in note for note in json.loads(said)["notes"])


def test_an_empty_set(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"Expected at least one row to attack.*found an empty set"):
        dlg_eval("--task", "audited_tasks:empty", "--out", str(tmp_path / "out"))


def test_images_of_another_shape(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"Expected rows that fit model 'twin', found inputs of shape \(81,\)"):
        dlg_eval("--task", "audited_tasks:wide", "--out", str(tmp_path / "out"))


def test_it_is_also_a_command_of_coterie() -> None:
    result = CliRunner().invoke(application(), ["attack", "--help"])
    assert result.exit_code == 0
    assert "--nu" in result.stdout


def test_an_error_is_one_line_on_standard_error(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['dlg-eval', *sys.argv[1:]]; from coterie.attacks.command import main; main()"
    arguments = ["--task", "digits", "--nu", "-1", "--out", str(tmp_path)]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "dlg-eval: error: Expected --nu to hold finite numbers of at least 0, found -1\n"
