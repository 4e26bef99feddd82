import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coterie.cli import main
from coterie.models import save_model
from coterie.parameters import layout_of, to_vector
from coterie.tasks import load_task

Run = Callable[..., tuple[int, str, str]]
HEADER = "DRG Definition,Provider Name,Provider Zip Code, Average Total Payments \n"


@pytest.fixture
def coterie(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``coterie("predict", …)``: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Predicts 0.5 + 0.1·service, with service -1, -1/3, 1/3, 1 for the four DRGs: hidden unit 1 is 1 + service."""
    path = tmp_path / "model.safetensors"
    vector = np.array([1, 0, 0, 0, 0, 0, 1, 0, 0.1, 0, 0.4], np.float32)
    save_model(path, "hospital", vector, layout_of(load_task("hospital").build()))
    return path


@pytest.fixture
def charges(tmp_path: Path) -> Path:
    path = tmp_path / "charges.csv"
    rows = '194 - A,"ST. MARY, INC.",36301,$5\n690 - B,X,1040,$6\n100 - C,X,1040,$7\n292 - D,X,0,$8\n'
    path.write_text(HEADER + rows)
    return path


def test_predictions_beside_the_rows(coterie: Run, model: Path, charges: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictions.csv"
    status, said, err = coterie("predict", model, charges, "--out", out)
    assert status == 0, err
    assert said == f"2 predictions in {out}\n"
    with out.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [
        "DRG Definition",
        "Provider Name",
        "Provider Zip Code",
        "Average Total Payments",
        "predicted_total_payment_dollars",
    ]
    assert rows == [
        ["194 - A", "ST. MARY, INC.", "36301", "$5", "4000.0"],
        ["690 - B", "X", "1040", "$6", "6000.0"],
    ]
    assert "1 rows left out: of DRGs other than" in err
    assert "1 rows skipped: ZIP code does not resolve ('00000')" in err


def test_standard_output_is_csv_or_json_only(coterie: Run, model: Path, charges: Path) -> None:
    status, out, _ = coterie("predict", model, charges)
    assert status == 0
    assert out.splitlines()[1] == '194 - A,"ST. MARY, INC.",36301,$5,4000.0'
    status, out, _ = coterie("predict", model, charges, "--json")
    assert status == 0
    assert [row["predicted_total_payment_dollars"] for row in json.loads(out)] == [4000.0, 6000.0]
    assert json.loads(out)[0]["Provider Name"] == "ST. MARY, INC."


def test_rows_without_payments(coterie: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    path.write_text("Provider Zip Code,DRG Definition\n36301,292 - HEART\n")
    status, out, err = coterie("predict", model, path)
    assert (status, err) == (0, "")
    assert out.splitlines()[1].startswith("36301,292 - HEART,4666.6")


def test_real_rows(coterie: Run, model: Path, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "shared" / "data" / "hospital_charges_fy2011_10drgs.csv.xz"
    if not path.exists():
        pytest.skip(f"no real data at {path}")
    out = tmp_path / "p.csv"
    assert coterie("predict", model, path, "--out", out)[0] == 0
    assert len(out.read_text().splitlines()) == 1 + 11_915


def test_one_line_for_each_mistake(coterie: Run, model: Path, charges: Path, tmp_path: Path) -> None:
    digits = tmp_path / "digits.safetensors"
    task = load_task("digits")
    initial = task.initialise(np.random.default_rng(0))
    save_model(digits, "digits", to_vector(initial), layout_of(initial))
    no_zip = tmp_path / "no_zip.csv"
    no_zip.write_text("DRG Definition,Zip\n194 - A,1\n")
    other_services = tmp_path / "other.csv"
    other_services.write_text(HEADER + "100 - C,X,1040,$7\n")
    for arguments, said in (
        ((digits, charges), "a task that predicts from files, found one for 'digits'"),
        ((tmp_path / "nope", charges), "Expected a model file at"),
        ((charges, charges), "Expected a safetensors model at"),
        ((model, tmp_path / "nope.csv"), "Expected a file at"),
        ((model, no_zip), "Expected a column 'Provider Zip Code' in"),
        ((model, other_services), "Expected rows of DRG 194, 292, 392, 690"),
        ((model, charges, "--task", "digits"), "Expected a model of task digits"),
        ((model, charges, "--out", tmp_path / "no" / "x.csv"), "Expected to write the predictions to"),
        ((model, charges, "--out", charges), "Expected --out to be another file"),
        ((model, charges, "--out", tmp_path / "x", "--json"), "Expected one of --out and --json"),
    ):
        status, out, err = coterie("predict", *arguments)
        lines = [line for line in err.splitlines() if not line.startswith("coterie predict: charges.csv:")]
        assert status != 0
        assert out == ""
        assert len(lines) == 1, err
        assert said in lines[0]
    assert charges.read_text().startswith(HEADER)
