"""Files that are whole after a crash."""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``: after a crash at any moment it is the old file or the new one, never a part.

    The content is synced under another name in the same folder, which is then renamed, and the folder synced.
    Raises ``OSError``.
    """
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's list of names, so that a file just made or renamed in it is there after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
