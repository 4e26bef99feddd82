"""A file is the old one or the new one, whatever happens in between."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.storage import write_atomically


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "card.json"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(descriptor: int) -> None:
        seen.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def watched_replace(self: Path, target: Path) -> Path:
        seen.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    write_atomically(tmp_path / "card.json", b"x")
    assert seen == ["file", "rename", "folder"]


def test_a_kill_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    write_atomically(path, b"old")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom coterie.storage import write_atomically\n"
        "Path.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(Path(sys.argv[1]), b'new' * 100000)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert path.read_bytes() == b"old"


def test_a_missing_folder_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        write_atomically(tmp_path / "none" / "card.json", b"x")
