"""Opening a data holder's file: plain, gzip or xz, always with an error that names the file."""

import gzip
import lzma
import zlib
from pathlib import Path

from coterie.errors import CoterieError

COMPRESSED_SUFFIXES = (".gz", ".xz")


def read_bytes(path: Path) -> bytes:
    """The whole content of ``path``, decompressed when its name ends in .gz or .xz.

    Raises ``CoterieError`` for a file that is missing, unreadable, empty, truncated or not what its suffix
    says.
    """
    try:
        if path.is_dir():
            raise CoterieError(f"Expected a file at {path}, found a folder")
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        elif path.suffix == ".xz":
            content = lzma.decompress(content)
    except FileNotFoundError as error:
        raise CoterieError(f"Expected a file at {path}, found none") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise CoterieError(
            f"Expected a complete {path.suffix} file at {path}, found: {error}; download or copy it again"
        ) from error
    except (OSError, ValueError) as error:
        raise CoterieError(f"Expected a readable file at {path}, found: {error}") from error
    if not content:
        raise CoterieError(f"Expected data in {path}, found an empty file")
    return content


def read_text(path: Path) -> str:
    """The content of ``path`` as UTF-8 text, without a byte-order mark."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise CoterieError(f"Expected UTF-8 text in {path}, found {byte}; save the file as UTF-8") from error


def stem(path: Path) -> str:
    """The file's name without its format and compression suffixes: ``charges.csv.xz`` -> ``charges``."""
    name = path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path
    return name.stem
