"""``coterie simulate`` as its user runs it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = (
    "--task",
    "synthetic",
    "--hypotheses",
    "2",
    "--rounds",
    "3",
    "--clients-per-round",
    "7",
    "--validate-every",
    "1",
)


def command(*arguments: object) -> list[str]:
    code = "from coterie.cli import main; main()"
    return [sys.executable, "-c", code, "simulate", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False)


def test_json_is_a_list_with_an_object_a_seed() -> None:
    done = run(*SMALL, "--noise-multiplier", 5, "--seeds", 3, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["seed"] for one in found] == [0, 1, 2]
    for one in found:
        assert one["metric"] > 0
        assert one["honest_metric"] > 0
        assert sum(one["clients_per_hypothesis"]) == 100
        assert one["rounds"] == 3
        assert one["collapsed"] in (True, False)
        # Two parameters at ν = 5: 0.4 a release, as in the paper.
        assert one["price"]["pure"] == pytest.approx(0.4 * one["price"]["releases"])
        assert one["price"]["tight"] <= one["price"]["pure"]
    assert found[0]["metric"] != found[1]["metric"]


def test_a_table_for_people_with_what_the_price_leaves_out(tmp_path: Path) -> None:
    done = run(*SMALL, "--seeds", 2, "--sweep", "nu=0,5", "--neighbourhood", "relative", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "RMSE" in said
    assert "not covered" in said
    assert "no d-privacy" in said
    assert "results.parquet" in done.stderr
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "points",
        "sweep.json",
        "results.parquet",
        "sweep.png",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task", "hospital"), "Expected --data FILE for task 'hospital', found none"),
        (("--task", "nothing"), "Expected task to be one of"),
        ((*SMALL, "--hypotheses", 0), "--hypotheses to be at least 1, found 0"),
        ((*SMALL, "--clients-per-round", 101), "at most 80, the clients that train of 100, found 101"),
        ((*SMALL, "--sweep", "x=1", "--out", "out"), "NAME one of k, nu, C, T, found 'x=1'"),
        ((*SMALL, "--sweep", "k=1"), "Expected --out DIR with --sweep"),
        ((*SMALL, "--seeds", 0), "--seeds to be from 1 to 10000, found 0"),
        ((*SMALL, "--clients", 0), "--clients to be at least 1"),
        ((*SMALL, "--partition-by", "x"), "--partition-by"),
        ((*SMALL, "--out", "/dev/null/x"), "Expected --out to be a folder, found a file: /dev/null"),
        ((*SMALL, "--device", "gpu"), "Expected --device to be cpu, cuda or cuda:N, found 'gpu'"),
        ((*SMALL, "--device", "cuda", "--ray", "local"), "Expected --ray or --device, found both"),
        ((*SMALL, "--ray", "far"), "Expected --ray local or HOST:PORT of a Ray cluster, found 'far'"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[object, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from coterie.cli import main  # in this process: a second for each interpreter would add up

    before = sys.argv
    sys.argv = ["coterie", "simulate", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("coterie: error: ")
    assert words in said[-1]


def test_interrupted_in_the_middle_it_goes_on_where_it_was(tmp_path: Path) -> None:
    long = (*SMALL, "--sweep", "T=3,100000", "--out", tmp_path)
    process = subprocess.Popen(command(*long), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    point = tmp_path / "points" / "T=3.json"
    until = time.monotonic() + 120
    while not point.exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "coterie: interrupted"
    assert "Traceback" not in said
    kept = point.read_bytes()
    done = run(*SMALL, "--sweep", "T=3,4", "--out", tmp_path, "--json")
    assert [one["rounds"] for one in json.loads(done.stdout)] == [3, 4]
    assert point.read_bytes() == kept


@pytest.mark.parametrize(
    ("prices", "shown"),
    [
        ([], "none"),
        ([{"formal": True, "tight": 1.9301}, {"formal": True, "tight": 1.0}], "1.931"),
        ([{"formal": True, "tight": 0.0}], "0"),
        ([{"formal": True, "tight": None}], "no bound"),
        ([{"formal": True, "tight": 1.0}, {"formal": False, "tight": 0.5}], "no guarantee"),
    ],
)
def test_a_shown_price_is_the_largest_and_rounded_up(prices: list[dict[str, object]], shown: str) -> None:
    from coterie.commands.simulate import _most

    assert _most(prices, "tight") == shown
