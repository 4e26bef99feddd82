"""Where the real data are, when they are, and a small web server on loopback that misbehaves as told."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets: $COTERIE_TEST_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("COTERIE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder} (COTERIE_TEST_DATA names another folder)")
    return folder


@dataclass
class Site:
    """What the server has, how it answers, and what it was asked."""

    files: dict[str, bytes]
    etag: str | None = '"v1"'
    ranges: bool = True
    drop_after: list[int] = field(default_factory=list)  # bytes of each answer before the connection is cut
    statuses: list[int] = field(default_factory=list)  # answers with these first, without a body
    shift: int = 0  # answers with a range that begins so much later than asked
    requests: list[dict[str, str]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serve(site: Site) -> Iterator[Site]:
    """Serve ``site`` on a free port; ``site.url`` is its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.requests.append({name.lower(): value for name, value in self.headers.items()})
            content = site.files.get(self.path)
            if site.statuses or content is None:
                self.send_response(site.statuses.pop(0) if site.statuses else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = 0
            asked = self.headers.get("Range")
            if asked and site.ranges and self.headers.get("If-Range") in (None, site.etag):
                start = int(asked.removeprefix("bytes=").removesuffix("-")) + site.shift
                if start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            if site.etag:
                self.send_header("ETag", site.etag)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            body = content[start:]
            if site.drop_after:
                self.wfile.write(body[: site.drop_after.pop(0)])
                self.close_connection = True
                return
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the tests' output is not a log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def web() -> Iterator[Callable[..., Site]]:
    """``web(files={"/x": b"…"}, drop_after=[100])``: a site that is served until the test is over."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(serve(Site(**settings)))
