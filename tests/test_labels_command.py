"""``coterie labels`` as its user meets it: what is written, what is refused, and that a second run does not leak."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from scipy import stats

from coterie.commands.labels import app
from coterie.labels.csv_table import CsvTable
from coterie.labels.releases import digest_of
from coterie.labels.tables import open_table
from coterie.labels.weights import class_weights
from coterie.mechanisms.labels.aggregation import AggregateNoisyLabels
from coterie.mechanisms.labels.losses import cluster_weights, debiased_weights
from coterie.mechanisms.labels.randomized_response import RandomizedResponse, RandomizedResponseWithPrior, top_k
from coterie.rng import seeded
from coterie.terminal import run

ROWS = 600
NAMES = ("flu", "cold", "none")
LABELS = "--labels flu,cold,none"


@pytest.fixture
def coterie(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    application = typer.Typer(pretty_exceptions_enable=False)
    application.add_typer(app, name="labels")
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", "labels", *line.split()])
        with pytest.raises(SystemExit) as ended:
            run("coterie", lambda: application)
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return call


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A CSV file with the columns site (public groups), x, and the private label y."""
    rng = seeded(1, "table")
    labels = rng.integers(3, size=ROWS)
    x = labels + rng.standard_normal(ROWS)
    lines = [f"s{i % 4},{x[i]:.4f},{NAMES[labels[i]]}\n" for i in range(ROWS)]
    path = tmp_path / "a.csv"
    path.write_text("site,x,y\n" + "".join(lines))
    return path


def column(path: Path, name: str = "y") -> list[str]:
    codes, values = open_table(path).coded(name)
    return [values[code] for code in codes]


def numbers(path: Path) -> list[int]:
    return [NAMES.index(label) for label in column(path)]


def good(answer: tuple[int, str, str]) -> str:
    status, out, err = answer
    assert status == 0, err
    return out


def refused(answer: tuple[int, str, str], words: str) -> str:
    status, _, err = answer
    assert status == 2
    assert err.count("\n") == 1, "an error is one line"
    assert re.search(words, err), err
    return err


def test_only_the_labels_change_and_by_the_mechanisms_law(coterie: Any, tmp_path: Path) -> None:
    """Operating system's noise, so the level is 1e-9; the law of another ε is the control."""
    rows = 20_000
    (tmp_path / "big.csv").write_text("x,y\n" + "".join(f"{i},flu\n" for i in range(rows)))
    good(coterie(f"sanitize big.csv --label y --out out.csv --epsilon 1 {LABELS}"))
    assert column(tmp_path / "out.csv", "x") == [str(i) for i in range(rows)]
    counts = np.bincount(numbers(tmp_path / "out.csv"), minlength=3)
    assert stats.chisquare(counts, rows * RandomizedResponse(3, 1.0).law()[0]).pvalue > 1e-9
    assert stats.chisquare(counts, rows * RandomizedResponse(3, 1.2).law()[0]).pvalue < 1e-9


def test_what_is_promised_is_written_and_said(coterie: Any, table: Path) -> None:
    out = good(coterie(f"sanitize {table} --label y --out n.csv --epsilon 0.7 {LABELS}"))
    written = json.loads(Path("n.csv.labels.json").read_text(encoding="utf-8"))
    assert written["release"] == {
        "mechanism": "randomized-response",
        "examples": ROWS,
        "epsilon": 0.7,
        "delta": 0.0,
        "partition": "",
        "part": 0,
    }
    for words in ("the label of any one row", "ε = 0.7", "Not protected: all other columns, the number", "second"):
        assert words in out
        assert any(words in sentence for sentence in written["guarantee"])
    assert class_weights(Path("n.csv")) == pytest.approx(
        debiased_weights(numbers(Path("n.csv")), classes=3, epsilon=0.7)
    )


def test_nothing_given_away_is_a_function_of_the_true_labels(coterie: Any, table: Path) -> None:
    """A hash of the labels would give them away to who tries them all; it is in the private records only."""
    digest = digest_of(*open_table(table).coded("y"))
    good(coterie(f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS}"))
    for path in (Path("n.csv"), Path("n.csv.labels.json"), Path("n.csv.labels.npz")):
        assert digest.encode() not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0
    records = table.parent / "coterie-label-releases"
    assert any(digest in path.read_text() for path in records.glob("*.json"))
    assert records.stat().st_mode & 0o077 == 0


def test_a_second_run_gives_the_same_labels(coterie: Any, table: Path) -> None:
    good(coterie(f"sanitize {table} --label y --out n.csv --epsilon 0.1 {LABELS}"))
    out = good(coterie(f"sanitize {table} --label y --out m.csv --epsilon 0.1 {LABELS}"))
    assert "no further cost" in out
    for name in ("{}", "{}.labels.json", "{}.labels.npz"):
        assert Path(name.format("n.csv")).read_bytes() == Path(name.format("m.csv")).read_bytes()
    out = good(coterie("account n.csv.labels.json m.csv.labels.json"))
    assert "1 release costs ε = 0.1 in label" in out


@pytest.mark.parametrize("change", ["--epsilon 2", "--epsilon 1 --mechanism uniform-rr"])
def test_a_second_release_is_refused_and_the_first_is_named(coterie: Any, table: Path, change: str) -> None:
    good(coterie(f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS}"))
    error = refused(coterie(f"sanitize {table} --label y --out m.csv {change} {LABELS}"), "released")
    assert "n.csv" in error
    assert "ε = 1" in error
    assert not Path("m.csv").exists()


def test_the_same_labels_are_known_under_another_name_format_and_column(coterie: Any, table: Path) -> None:
    good(coterie(f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS}"))
    shutil.copy(table, "copy.csv")
    good(coterie(f"sanitize copy.csv --label y --out m.csv --epsilon 1 {LABELS}"))
    assert Path("m.csv").read_bytes() == Path("n.csv").read_bytes()
    pq.write_table(pa.table({"diagnosis": column(table)}), "b.parquet")
    refused(coterie(f"sanitize b.parquet --label diagnosis --out m.parquet --epsilon 2 {LABELS}"), "released")


def test_labels_that_changed_since_are_refused(coterie: Any, table: Path) -> None:
    """Rows added to a released table would have the old rows randomized again."""
    good(coterie(f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS}"))
    with table.open("a") as file:
        file.write("s0,1.0,flu\n")
    refused(
        coterie(f"sanitize {table} --label y --out m.csv --epsilon 1 {LABELS}"), "new rows into a file of their own"
    )


def test_a_run_that_failed_while_writing_is_finished_with_the_same_labels(
    coterie: Any, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(CsvTable, "write", fail)
        refused(coterie(f"sanitize {table} --label y --out n.csv --epsilon 0.1 {LABELS}"), "no space left")
    with np.load(table.parent / "coterie-label-releases" / "000001.npz") as stored:
        labels = stored["labels"].tolist()
    assert not Path("n.csv").exists()
    good(coterie(f"sanitize {table} --label y --out n.csv --epsilon 0.1 {LABELS}"))
    assert numbers(Path("n.csv")) == labels


def test_nothing_leaves_without_a_record(coterie: Any, table: Path) -> None:
    (table.parent / "coterie-label-releases").write_text("not a folder")
    refused(coterie(f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS}"), "--records")
    assert not list(Path().glob("n.csv*"))


def test_a_damaged_record_is_not_taken_for_none(coterie: Any, table: Path) -> None:
    good(coterie(f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS}"))
    (table.parent / "coterie-label-releases" / "000001.npz").write_bytes(b"")
    refused(coterie(f"sanitize {table} --label y --out m.csv --epsilon 1 {LABELS}"), "restore it")


def test_a_prior_of_each_group(coterie: Any, table: Path) -> None:
    """From a table of probabilities; k* of each row is that of its group's prior."""
    priors = {"s0": (0.9, 0.1, 0), "s1": (0.5, 0.5, 0), "s2": (1, 1, 1), "s3": (0, 0.1, 0.9)}
    Path("p.csv").write_text(
        "site,flu,cold,none\n" + "".join(f"{site},{a},{b},{c}\n" for site, (a, b, c) in reversed(priors.items()))
    )
    line = f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS} --mechanism rr-with-prior --group site"
    out = good(coterie(f"{line} --prior p.csv"))
    assert "voids the guarantee" in out
    response = RandomizedResponseWithPrior(3, 1.0)
    subsets = [top_k(np.array(priors[site]), response.subset_size(priors[site])) for site in column(table, "site")]
    assert all(subset[label] for subset, label in zip(subsets, numbers(Path("n.csv")), strict=True))
    weights = class_weights(Path("n.csv"))
    assert ((weights != 0) == np.array(subsets)).all()


def test_a_prior_from_public_labels(coterie: Any, table: Path) -> None:
    Path("public.csv").write_text("site,y\ns0,flu\ns0,flu\ns1,cold\ns9,none\n")
    line = f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS} --mechanism rr-top-k --k 1 --group site"
    good(coterie(f"{line} --public public.csv"))
    sites, labels = column(table, "site"), column(Path("n.csv"))
    assert {labels[i] for i in range(ROWS) if sites[i] == "s0"} == {"flu"}
    assert {labels[i] for i in range(ROWS) if sites[i] == "s1"} == {"cold"}


def test_a_prior_of_each_row(coterie: Any, table: Path) -> None:
    """One that is sure of a class gives k* = 1 and that class, row by row."""
    sure = np.arange(ROWS) % 3
    np.save("p.npy", np.eye(3)[sure] + 1e-6)
    good(
        coterie(f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS} --mechanism rr-with-prior --prior p.npy")
    )
    assert numbers(Path("n.csv")) == sure.tolist()
    assert class_weights(Path("n.csv")) == pytest.approx(np.eye(3)[sure])


def test_private_labels_are_no_public_ones(coterie: Any, table: Path) -> None:
    shutil.copy(table, "public.csv")
    line = f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS} --mechanism rr-with-prior --group site"
    refused(coterie(f"{line} --public public.csv"), "voids the guarantee")


def test_peers_in_unequal_clusters_have_the_smallest_ones_delta(coterie: Any) -> None:
    np.savez("a.npz", y=np.arange(60) % 2, c=np.repeat([0, 1, 1], 20))
    out = good(coterie("sanitize a.npz --label y --out n.npz --epsilon 1 --classes 2 --mechanism p2p --group c --json"))
    assert 0.99 / 400 < json.loads(out)["release"]["delta"] <= 1 / 400


def test_another_prior_in_the_same_file_is_another_choice(coterie: Any, table: Path) -> None:
    np.save("p.npy", [0.5, 0.3, 0.2])
    line = f"sanitize {table} --label y --epsilon 1 {LABELS} --mechanism rr-with-prior --prior p.npy"
    good(coterie(f"{line} --out n.csv"))
    np.save("p.npy", [0.2, 0.3, 0.5])
    refused(coterie(f"{line} --out m.csv"), "other choices of prior")


@pytest.mark.parametrize("division", ["--group site", "--features x --clusters 5"])
def test_cluster_response_and_its_loss(coterie: Any, table: Path, division: str) -> None:
    line = f"sanitize {table} --label y --out n.csv --epsilon 1 {LABELS} --mechanism cluster-rr --floor 0.1"
    out = good(coterie(f"{line} {division}"))
    assert "which group or cluster a row is in" in out
    assert "ε = 1." in out
    with np.load("n.csv.labels.npz") as stored:
        q, clusters = stored["distributions"], stored["clusters"]
    assert q.min() >= 0.1 - 1e-12
    if "site" in division:
        sites = column(table, "site")
        assert len({(site, int(cluster)) for site, cluster in zip(sites, clusters, strict=True)}) == 4
    resampling = 1 / (1 + 0.1 * np.expm1(0.5))  # λ for ε/2 at τ = 0.1, papers.md (b)
    expected = cluster_weights(numbers(Path("n.csv")), q, clusters, correction=resampling)
    assert class_weights(Path("n.csv")) == pytest.approx(expected, rel=1e-12)
    assert class_weights(Path("n.csv"), correction=0.0) == pytest.approx(np.eye(3)[numbers(Path("n.csv"))])


def test_peers_exchange_binary_labels(coterie: Any) -> None:
    """s = 50 and ε = 1: p = 0.03568 at δ = 1/s², papers.md (b)."""
    labels = np.arange(200) % 2
    np.savez("a.npz", y=labels, c=np.repeat(np.arange(4), 50))
    out = good(coterie("sanitize a.npz --label y --out n.npz --epsilon 1 --classes 2 --mechanism p2p --group c --json"))
    answer = json.loads(out)
    assert answer["loss"]["flip_probability"] == pytest.approx(0.03568, rel=2e-3)  # there by a coarse search
    assert answer["release"]["delta"] <= 1 / 2500
    assert answer["release"]["delta"] == pytest.approx(1 / 2500, rel=1e-3)
    assert any("who asked whom" in sentence for sentence in answer["guarantee"])
    p = answer["loss"]["flip_probability"]
    with np.load("n.npz") as found:
        expected = (np.eye(2)[found["y"]] - p) / (1 - 2 * p)
    assert class_weights(Path("n.npz")) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--label z", "did you mean|it has site, x, y"),
        ("--label sit", "did you mean 'site'"),
        ("--classes 3", "found another one"),
        ("--labels flu,cold", "found another one or a missing one"),
        ("--labels flu", "2 possible labels"),
        ("--epsilon 0", "--epsilon above 0"),
        ("--epsilon nan", "--epsilon above 0"),
        ("--delta 0.1", "--delta with --mechanism p2p only"),
        ("--k 2", "--k with --mechanism rr-top-k only"),
        ("--mechanism rr-top-k", "--k with --mechanism rr-top-k, found none"),
        ("--mechanism rr-top-k --k 4", "from 1 to 3, found 4"),
        ("--mechanism cluster-rr --group site", "--floor"),
        ("--mechanism cluster-rr --group site --floor 0.5", "1/3, found 0.5"),
        ("--mechanism cluster-rr --floor 0.1", "one of --group and --features, found none"),
        ("--mechanism cluster-rr --floor 0.1 --features x", "--features and --clusters together"),
        ("--mechanism cluster-rr --floor 0.1 --features site --clusters 2", "numbers in 'site', found 's0' in row 1"),
        ("--mechanism cluster-rr --floor 0.1 --features y --clusters 2", "without the private 'y'"),
        ("--mechanism cluster-rr --floor 0.1 --group x", "found one of 1"),
        ("--mechanism cluster-rr --floor 0.1 --features x --clusters 601", "as the 600 rows"),
        ("--mechanism p2p --group site", "2 possible labels with p2p, found 3"),
        ("--mechanism rr-with-prior --prior negative.npy", ">= 0 and finite"),
        ("--mechanism rr-with-prior --prior zero.npy", "positive sum"),
        ("--mechanism rr-with-prior --prior short.npy", "shape"),
        ("--mechanism rr-with-prior --prior nowhere.npy", "nowhere.npy"),
        ("--mechanism rr-with-prior --prior sites.csv --group site", "found none for 's1', 's2', 's3'"),
        ("--mechanism rr-with-prior --prior negative.npy --public a.csv", "at most one of"),
        ("--out a.csv", "nothing is overwritten"),
        ("--out n.parquet", "end in .csv"),
        ("--out nowhere/n.csv", "make it first"),
    ],
)
def test_bad_input_is_one_line_and_no_release(coterie: Any, table: Path, options: str, words: str) -> None:
    np.save("negative.npy", [1.0, -1, 0])
    np.save("zero.npy", [0.0, 0, 0])
    np.save("short.npy", [1.0, 1])
    Path("sites.csv").write_text("site,flu,cold,none\ns0,1,1,1\n")
    given = {"--label": "y", "--out": "n.csv", "--epsilon": "1", "--labels": "flu,cold,none"}
    parts = options.split()
    given |= dict(zip(parts[::2], parts[1::2], strict=True))
    if "--classes" in given:
        del given["--labels"]
    error = refused(coterie("sanitize a.csv " + " ".join(f"{k} {v}" for k, v in given.items())), words)
    if "another one" in error:
        assert "none" not in error.replace("found none", "")
    assert not list(Path().glob("n.csv*"))
    assert not list((table.parent / "coterie-label-releases").glob("0*"))


def test_labels_must_be_in_one_column_and_in_a_table(coterie: Any) -> None:
    Path("twice.csv").write_text("y,z\n0,0\n1,1\n")
    refused(coterie("sanitize twice.csv --label y --out n.csv --epsilon 1 --classes 2"), "same values in z")
    Path("empty.csv").write_text("y\n")
    refused(coterie("sanitize empty.csv --label y --out n.csv --epsilon 1 --classes 2"), "Expected rows")
    Path("a.txt").write_text("y\n")
    refused(coterie("sanitize a.txt --label y --out n.txt --epsilon 1 --classes 2"), "ends in")
    np.savez("objects.npz", y=np.eye(2))
    refused(coterie("sanitize objects.npz --label y --out n.npz --epsilon 1 --classes 2"), "vector")
    Path("a.parquet").write_text("no parquet")
    refused(coterie("sanitize a.parquet --label y --out n.parquet --epsilon 1 --classes 2"), "parquet file")


def test_released_tables_add_up_or_not(coterie: Any) -> None:
    for name, epsilon in (("a", 1), ("b", 2)):
        Path(f"{name}.csv").write_text("y\n0\n1\n" + ("1\n" if name == "b" else "0\n"))
        good(coterie(f"sanitize {name}.csv --label y --out {name}-out.csv --epsilon {epsilon} --classes 2"))
    both = "a-out.csv.labels.json b-out.csv.labels.json"
    assert json.loads(good(coterie(f"account {both} --json")))["epsilon"] == 3
    assert json.loads(good(coterie(f"account {both} --disjoint --json")))["epsilon"] == 2
    refused(coterie("account a.csv"), "label specification")


def test_planned_releases_are_priced_and_calibrated(coterie: Any) -> None:
    """Numbers of papers.md (b) to (d)."""

    def planned(line: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(good(coterie(f"account --json --mechanism {line}")))
        return answer

    peers = planned("p2p --epsilon 0.5 --cluster-size 100")
    assert peers["settings"]["flip_probability"] == pytest.approx(0.14228, abs=1e-5)
    assert peers["delta"] <= 1e-4
    assert planned("p2p --epsilon 0.5 --cluster-size 100 --releases 3")["delta"] == 3 * peers["delta"]
    assert planned("rr --epsilon 1 --classes 10")["settings"]["keep_probability"] == pytest.approx(0.2319693)
    assert planned("uniform-rr --epsilon 1 --classes 10")["settings"]["resampling"] == pytest.approx(0.8533674)
    clusters = planned("cluster-rr --epsilon 2 --classes 10 --floor 0.05")
    assert clusters["settings"]["resampling"] == pytest.approx(0.9208832)
    assert clusters["settings"]["histogram_noise_scale"] == 2
    assert clusters["epsilon"] == pytest.approx(2)
    three = planned("rr-with-prior --epsilon 1 --classes 10 --releases 3")
    assert (three["epsilon"], three["releases"]) == (3, 3)
    bags = planned("noisy-wtd-llp --epsilon 1 --rows 400 --bag-size 30 --bags 4 --noisy 200 --label-bound 0.5")
    assert bags["delta"] == AggregateNoisyLabels(400, 30, 4, 200, 0.5).delta(1.0)
    assert planned("wtd-lba")["epsilon"] is None
    assert "No guarantee" in good(coterie("account --mechanism wtd-lba"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("account", "found neither"),
        ("account --epsilon 1", "--mechanism with the other options"),
        ("account --mechanism rr --epsilon 1", "--classes with --mechanism rr"),
        ("account --mechanism rr --epsilon 1 --classes 3 --floor 0.1", "no --floor with --mechanism rr"),
        ("account --mechanism magic --epsilon 1", "one of rr"),
        ("account --mechanism p2p --epsilon 1 --cluster-size 1", "size"),
        ("account --mechanism p2p --epsilon 1 --cluster-size 5000", "at most 1000"),
        ("account --mechanism rr --epsilon 1 --classes 3 --releases 0", "--releases of 1"),
        ("account x.labels.json --mechanism rr", "found both"),
        ("account x.labels.json", "x.labels.json"),
    ],
)
def test_account_refuses_in_one_line(coterie: Any, line: str, words: str) -> None:
    refused(coterie(line), words)
