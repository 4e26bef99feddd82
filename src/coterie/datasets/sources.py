"""Where the public data sets come from, and where they are kept on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import CoterieError


@dataclass(frozen=True)
class Download:
    """One file of a public source. ``sha256`` is None where no checksum is published or known to us."""

    url: str
    file: str
    sha256: str | None = None


@dataclass(frozen=True)
class PublicSource:
    """A data set as published; ``files`` is what the reader is given, the downloads or what is made of them."""

    name: str
    title: str
    size: str
    downloads: tuple[Download, ...]
    files: tuple[str, ...]
    remark: str = ""

    def data_path(self, folder: Path) -> Path:
        """What ``--data`` is given: the only file, or the folder of several."""
        return folder / self.files[0] if len(self.files) == 1 else folder


# The checksums of MNIST's four files are in several independent public programs that read it.
_MNIST = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}

SOURCES = {
    "hospital": PublicSource(
        name="hospital",
        title=(
            "CMS: Inpatient Prospective Payment System (IPPS) Provider Summary for the Top 100 "
            "Diagnosis-Related Groups (DRG) - FY2011"
        ),
        size="about 27 MB",
        downloads=(
            Download("https://data.cms.gov/api/views/97k6-zzx3/rows.csv?accessType=DOWNLOAD", "ipps_fy2011.csv"),
        ),
        files=("ipps_fy2011.csv",),
        remark=(
            "this address served the file for years, but CMS has since rebuilt data.cms.gov and we could not try it; "
            "no checksum is published"
        ),
    ),
    # The checksum and the size are those that other public programs record for this address.
    "femnist": PublicSource(
        name="femnist",
        title="FEMNIST: NIST Special Database 19 as LEAF prepares it, packed by TensorFlow Federated (3,400 writers)",
        size="171 MB, 4.7 GB while it is unpacked",
        downloads=(
            Download(
                "https://storage.googleapis.com/tff-datasets-public/emnist_all.sqlite.lzma",
                "emnist_all.sqlite.lzma",
                "c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48",
            ),
        ),
        files=("femnist.npz",),
        remark="json that LEAF's own scripts make is read as well: give it to --data",
    ),
    "mnist": PublicSource(
        name="mnist",
        title="MNIST database of handwritten digits, idx files (the mirror that torchvision uses)",
        size="11 MB",
        downloads=tuple(
            Download(f"https://ossci-datasets.s3.amazonaws.com/mnist/{file}", file, sha256)
            for file, sha256 in _MNIST.items()
        ),
        files=tuple(_MNIST),
    ),
}


def source_named(name: str) -> PublicSource:
    """The public source called ``name``. Raises ``CoterieError`` for an unknown one."""
    if name not in SOURCES:
        raise CoterieError(f"Expected a data set name, one of {', '.join(SOURCES)}, found {name!r}")
    return SOURCES[name]


def cache_folder() -> Path:
    """The folder that holds a folder per data set: $COTERIE_DATA, or coterie in the user's cache folder."""
    if chosen := os.environ.get("COTERIE_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coterie"
