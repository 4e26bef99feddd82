import gzip
import hashlib
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli import main
from coterie.datasets import sources
from coterie.datasets.sources import Download, PublicSource, cache_folder

CSV = b"DRG Definition,Provider Id,Provider Zip Code, Average Total Payments \n" + b"".join(
    f"194 - PNEUMONIA,{10001 + row},36301,${5000 + row}.24\n".encode() for row in range(2_000)
)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def coterie(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``coterie("data", "list")``: exit status, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def publish(monkeypatch: pytest.MonkeyPatch, name: str, *downloads: Download) -> None:
    """Let the source ``name`` come from elsewhere: the test's own server."""
    known = sources.SOURCES[name]
    files = tuple(item.file for item in downloads)
    changed = PublicSource(name, known.title, known.size, downloads, files)
    monkeypatch.setitem(sources.SOURCES, name, changed)


def test_list_names_each_source_and_whether_it_is_here(coterie: Run, cache: Path) -> None:
    status, out, _ = coterie("data", "list")
    assert status == 0
    for name in ("hospital", "femnist", "mnist"):
        assert f"{name}: not here" in out
    assert "https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz" in out
    (cache / "hospital").mkdir(parents=True)
    (cache / "hospital" / "ipps_fy2011.csv").write_bytes(CSV)
    assert f"hospital: here, {cache / 'hospital' / 'ipps_fy2011.csv'}" in coterie("data", "list")[1]


def test_fetch_resumes_and_trusts_the_first_checksum(
    coterie: Run, cache: Path, web: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = web(files={"/x": CSV}, drop_after=[50_000])
    publish(monkeypatch, "hospital", Download(f"{site.url}/x", "ipps_fy2011.csv"))
    status, out, err = coterie("data", "fetch", "hospital")
    path = cache / "hospital" / "ipps_fy2011.csv"
    assert (status, out) == (0, f"hospital: 2,000 rows of 2,000 data holders; use it with --data {path}\n"), err
    assert path.read_bytes() == CSV
    assert site.requests[1]["range"] == "bytes=50000-"
    assert "ipps_fy2011.csv" in err  # the bar
    sums = (cache / "hospital" / "SHA256SUMS").read_text()
    assert sums == f"{hashlib.sha256(CSV).hexdigest()}  ipps_fy2011.csv\n"
    assert {entry.name for entry in (cache / "hospital").iterdir()} == {"ipps_fy2011.csv", "SHA256SUMS"}

    # A second fetch asks the server for nothing.
    assert coterie("data", "fetch", "hospital")[0] == 0
    assert len(site.requests) == 2
    status, out, _ = coterie("data", "check", "hospital")
    assert status == 0
    assert "2,000 rows" in out
    assert "those recorded at the first fetch" in out

    path.write_bytes(CSV.replace(b"$5000.24", b"$5001.24"))
    status, out, err = coterie("data", "check", "hospital")
    assert status != 0
    assert "Expected the recorded SHA-256" in err
    assert "Traceback" not in err


def test_published_checksums_of_several_files(
    coterie: Run, cache: Path, web: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.zeros((6, 28, 28), np.uint8)
    files = {
        "train-images-idx3-ubyte.gz": gzip.compress(b"\0\0\x08\x03" + struct.pack(">3I", 6, 28, 28) + images.tobytes()),
        "train-labels-idx1-ubyte.gz": gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 6) + bytes(6)),
    }
    site = web(files={f"/{name}": content for name, content in files.items()})
    downloads = [Download(f"{site.url}/{name}", name, hashlib.sha256(files[name]).hexdigest()) for name in files]
    publish(monkeypatch, "mnist", *downloads)
    status, out, err = coterie("data", "fetch", "mnist")
    assert (status, out) == (0, f"mnist: 6 rows; use it with --data {cache / 'mnist'}\n"), err
    assert "the published ones" in coterie("data", "check", "mnist")[1]

    publish(monkeypatch, "mnist", downloads[0], Download(downloads[1].url, downloads[1].file, "0" * 64))
    status, _, err = coterie("data", "check", "mnist")
    assert status != 0
    assert f"Expected the published SHA-256 {'0' * 64}" in err


def test_without_a_network_it_says_what_to_save_where_and_takes_it_from_there(coterie: Run, cache: Path) -> None:
    # Port 1 on loopback: nobody listens.
    with pytest.MonkeyPatch.context() as patch:
        publish(patch, "hospital", Download("http://127.0.0.1:1/x", "ipps_fy2011.csv"))
        status, out, err = coterie("data", "fetch", "hospital")
        place = cache / "hospital" / "incoming" / "ipps_fy2011.csv"
        (line,) = [line for line in err.splitlines() if line.startswith("coterie: error:")]
        assert status != 0
        assert out == ""
        assert f"save http://127.0.0.1:1/x as {place}, then run coterie data fetch hospital again" in line
        assert "Provider Summary for the Top 100 Diagnosis-Related Groups (DRG) - FY2011" in line

        place.write_bytes(CSV)
        status, out, err = coterie("data", "fetch", "hospital")
        assert status == 0, err
        assert (cache / "hospital" / "ipps_fy2011.csv").read_bytes() == CSV


def test_a_page_in_place_of_the_file_is_put_aside(
    coterie: Run, cache: Path, web: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = web(files={"/x": b"<!DOCTYPE html><html>moved</html>"})
    publish(monkeypatch, "hospital", Download(f"{site.url}/x", "ipps_fy2011.csv"))
    status, _, err = coterie("data", "fetch", "hospital")
    assert status != 0
    assert "Expected a column 'DRG Definition' in" in err
    assert not (cache / "hospital" / "ipps_fy2011.csv").exists()
    site.files["/x"] = CSV
    status, _, err = coterie("data", "fetch", "hospital")
    assert status == 0, err


def test_wrong_names_and_absent_data(coterie: Run) -> None:
    for arguments, said in (
        (("fetch", "hopsital"), "one of hospital, femnist, mnist, found 'hopsital'"),
        (("check", "mnist"), "coterie data fetch mnist gets it"),
    ):
        status, _, err = coterie("data", *arguments)
        assert status != 0
        assert said in err
        assert len(err.splitlines()) == 1


def test_a_cache_folder_that_cannot_be_made(coterie: Run, cache: Path) -> None:
    cache.write_text("a file")
    status, _, err = coterie("data", "fetch", "hospital")
    assert status != 0
    assert f"Expected to make the folder {cache / 'hospital' / 'incoming'}" in err
    assert "Traceback" not in err


def test_default_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/coterie")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/coterie")
    monkeypatch.setenv("COTERIE_DATA", "~/data")
    assert cache_folder() == Path("/home/somebody/data")
