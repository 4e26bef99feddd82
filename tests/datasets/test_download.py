import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from coterie.datasets.download import FAILURES_ALLOWED, download
from coterie.datasets.sources import Download
from coterie.errors import CoterieError

CONTENT = bytes(range(256)) * 4000  # 1 MB
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Fetcher:
    """Downloads ``/x`` of a site to a folder, and remembers pauses and progress."""

    def __init__(self, folder: Path) -> None:
        self.target = folder / "x"
        self.part = folder / "x.part"
        self.pauses: list[float] = []
        self.progress: list[tuple[int, int | None]] = []

    def __call__(self, url: str, sha256: str | None = None, stop_at: int | None = None) -> bytes:
        def progress(done: int, total: int | None) -> None:
            self.progress.append((done, total))
            if stop_at is not None and done >= stop_at:
                raise KeyboardInterrupt

        with httpx.Client(timeout=5) as client:
            item = Download(f"{url}/x", "x", sha256)
            download(item, self.target, client=client, progress=progress, pause=self.pauses.append)
        return self.target.read_bytes()


@pytest.fixture
def fetcher(tmp_path: Path) -> Fetcher:
    return Fetcher(tmp_path)


Web = Callable[..., Any]


def test_whole_file_at_once(web: Web, fetcher: Fetcher) -> None:
    site = web(files={"/x": CONTENT})
    assert fetcher(site.url, SHA256) == CONTENT
    assert fetcher.progress[-1] == (len(CONTENT), len(CONTENT))
    assert len(site.requests) == 1
    assert "range" not in site.requests[0]
    assert [path.name for path in fetcher.target.parent.iterdir()] == ["x"]


def test_dropped_connections_are_resumed_where_they_ended(web: Web, fetcher: Fetcher) -> None:
    site = web(files={"/x": CONTENT}, drop_after=[300_000, 200_000])
    assert fetcher(site.url) == CONTENT
    first, second, third = site.requests
    assert "range" not in first
    assert second["range"] == "bytes=300000-"
    assert third["range"] == "bytes=500000-"
    assert second["if-range"] == third["if-range"] == '"v1"'
    assert fetcher.pauses == [1, 1]
    assert fetcher.progress[-1] == (len(CONTENT), len(CONTENT))


def test_an_interrupted_program_goes_on_in_a_later_run(web: Web, fetcher: Fetcher) -> None:
    site = web(files={"/x": CONTENT})
    with pytest.raises(KeyboardInterrupt):
        fetcher(site.url, SHA256, stop_at=400_000)
    kept = fetcher.part.stat().st_size
    assert 400_000 <= kept < len(CONTENT)
    assert not fetcher.target.exists()
    assert fetcher(site.url, SHA256) == CONTENT
    assert site.requests[-1]["range"] == f"bytes={kept}-"


@pytest.mark.parametrize("etag", ['"v2"', None, 'W/"v1"'])
def test_a_changed_or_unmarked_file_starts_anew(web: Web, fetcher: Fetcher, etag: str | None) -> None:
    """Without a checksum, bytes of two versions are never joined."""
    before = web(files={"/x": CONTENT}, etag=etag if etag != '"v2"' else '"v1"')
    with pytest.raises(KeyboardInterrupt):
        fetcher(before.url, stop_at=400_000)
    changed = CONTENT[::-1]
    assert fetcher(web(files={"/x": changed}, etag=etag).url) == changed


def test_a_known_checksum_allows_resuming_without_an_entity_tag(web: Web, fetcher: Fetcher) -> None:
    site = web(files={"/x": CONTENT}, etag=None, drop_after=[300_000])
    assert fetcher(site.url, SHA256) == CONTENT
    assert site.requests[1]["range"] == "bytes=300000-"


def test_a_server_without_ranges_starts_anew(web: Web, fetcher: Fetcher) -> None:
    assert fetcher(web(files={"/x": CONTENT}, ranges=False, drop_after=[300_000]).url, SHA256) == CONTENT


def test_a_part_that_is_all_of_it(web: Web, fetcher: Fetcher) -> None:
    fetcher.part.write_bytes(CONTENT)
    assert fetcher(web(files={"/x": CONTENT}).url, SHA256) == CONTENT


def test_a_part_that_is_longer_than_the_file_starts_anew(web: Web, fetcher: Fetcher) -> None:
    fetcher.part.write_bytes(CONTENT + b"more")
    assert fetcher(web(files={"/x": CONTENT}).url, SHA256) == CONTENT


def test_a_range_that_was_not_asked_for_is_not_joined(web: Web, fetcher: Fetcher) -> None:
    fetcher.part.write_bytes(CONTENT[:1000])
    assert fetcher(web(files={"/x": CONTENT}, shift=7).url, SHA256) == CONTENT


def test_another_checksum_is_refused_and_deleted(web: Web, fetcher: Fetcher) -> None:
    site = web(files={"/x": CONTENT[:-1]})
    with pytest.raises(CoterieError, match=f"Expected SHA-256 {SHA256} for {site.url}/x, found [0-9a-f]{{64}}"):
        fetcher(site.url, SHA256)
    assert list(fetcher.target.parent.iterdir()) == []


def test_server_errors_pass_and_refusals_do_not(web: Web, fetcher: Fetcher) -> None:
    assert fetcher(web(files={"/x": CONTENT}, statuses=[503, 500]).url) == CONTENT
    assert fetcher.pauses == [1, 2]
    with pytest.raises(CoterieError, match="404"):
        fetcher(web(files={}).url)
    assert fetcher.pauses == [1, 2]


def test_a_server_that_gives_nothing_more_is_left_in_the_end(web: Web, fetcher: Fetcher) -> None:
    site = web(files={"/x": CONTENT}, drop_after=[300_000] + [0] * 100)
    with pytest.raises(CoterieError, match="300000 bytes are kept, the next fetch resumes"):
        fetcher(site.url)
    assert len(fetcher.pauses) == FAILURES_ALLOWED
    site.drop_after.clear()
    assert fetcher(site.url) == CONTENT


def test_a_server_that_cannot_be_reached_is_not_waited_for(fetcher: Fetcher) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(CoterieError, match=f"Expected to download {url}/x, found: .*refused"):
            fetcher(url)
    assert fetcher.pauses == []
