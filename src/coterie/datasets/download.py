"""Downloading one large file: resumed after a drop or a restart, checked, and whole or absent."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from coterie.datasets.sources import Download
from coterie.errors import CoterieError

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all (None: unknown)

FAILURES_ALLOWED = 5  # in a row, without a byte in between
TIMEOUT_SECONDS = 30.0


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_client() -> httpx.Client:
    """An HTTP client that follows redirects."""
    return httpx.Client(follow_redirects=True, timeout=TIMEOUT_SECONDS)


def download(
    item: Download,
    target: Path,
    *,
    client: httpx.Client,
    progress: Progress,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Download ``item`` to ``target``, whose folder exists; ``target`` appears only when it is complete and
    checked.

    Bytes are kept in ``target`` + ``.part`` when the connection drops or the process ends, and the next
    attempt, here or in a later run, asks for the rest (HTTP Range). The rest is only asked for where a mix
    of two versions would be noticed: with the server's entity tag (If-Range), or a known checksum. A server
    that answers with the whole file starts it anew. Dropped connections are retried while bytes arrive; a
    first connection that fails is not.

    Raises ``CoterieError`` when the server cannot be reached or refuses, when the disk is full, and for
    another checksum than ``item.sha256`` (the file is then deleted).
    """
    part = target.with_name(f"{target.name}.part")
    failures = 0
    received = 0
    while True:
        before = received
        try:
            received += _attempt(item, part, client, progress)
            break
        except _AttemptError as interruption:
            received += interruption.received
            failures = 1 if received > before else failures + 1
            unreachable = received == 0 and isinstance(
                interruption.__cause__, httpx.ConnectError | httpx.ConnectTimeout
            )
            if unreachable or failures > FAILURES_ALLOWED:
                kept = f" ({_size(part)} bytes are kept, the next fetch resumes)" if _size(part) else ""
                raise CoterieError(f"Expected to download {item.url}, found: {interruption}{kept}") from interruption
            pause(2.0 ** (failures - 1))
        except httpx.HTTPError as error:
            raise CoterieError(f"Expected to download {item.url}, found: {error or type(error).__name__}") from error
        except OSError as error:
            raise CoterieError(f"Expected to write {part}, found: {error}") from error
    found = sha256_of(part)
    _tag_file(part).unlink(missing_ok=True)
    if item.sha256 is not None and found != item.sha256:
        part.unlink()
        raise CoterieError(
            f"Expected SHA-256 {item.sha256} for {item.url}, found {found}: deleted; the source may have changed"
        )
    part.replace(target)


class _AttemptError(Exception):
    """An attempt ended early, for a reason that may pass; ``received`` new bytes are in the file."""

    def __init__(self, reason: str, received: int) -> None:
        super().__init__(reason)
        self.received = received


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _tag_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.etag")


def _attempt(item: Download, part: Path, client: httpx.Client, progress: Progress) -> int:
    """One request, to the end of the file; the number of bytes received."""
    have, tag = _size(part), _tag_file(part)
    headers = {"Accept-Encoding": "identity"}  # offsets count the file's own bytes
    if have and tag.exists():
        headers |= {"Range": f"bytes={have}-", "If-Range": tag.read_text()}
    elif have and item.sha256 is not None:
        headers |= {"Range": f"bytes={have}-"}
    received = 0
    try:
        with client.stream("GET", item.url, headers=headers) as response:
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                if response.headers.get("Content-Range") == f"bytes */{have}":
                    return 0  # all of it was here already
                part.unlink(missing_ok=True)
                raise _AttemptError("the server's file is shorter than the part kept; starting anew", 0)
            if response.status_code >= 500:
                raise _AttemptError(f"HTTP status {response.status_code}", 0)
            response.raise_for_status()
            resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
            if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                part.unlink(missing_ok=True)
                raise _AttemptError("another range than was asked for; starting anew", 0)
            if not resumed:
                have = 0
                _remember_tag(tag, response.headers.get("ETag", ""))
            length = response.headers.get("Content-Length", "")
            total = have + int(length) if length.isdecimal() else None
            with part.open("ab" if resumed else "wb") as file:
                for chunk in response.iter_raw():
                    file.write(chunk)
                    received += len(chunk)
                    progress(have + received, total)
                file.flush()
                os.fsync(file.fileno())
    except httpx.TransportError as error:
        raise _AttemptError(str(error) or type(error).__name__, received) from error
    return received


def _remember_tag(tag: Path, value: str) -> None:
    if value.startswith('"'):  # a weak tag does not promise equal bytes
        tag.write_text(value)
    else:
        tag.unlink(missing_ok=True)
