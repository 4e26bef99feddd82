"""Real processes on loopback: one ``flower-server`` and its clients."""

import os
import socket
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

BIN = Path(sysconfig.get_path("scripts"))
PATIENCE = 240.0
Run = Callable[..., subprocess.Popen[str]]


def free_address() -> str:
    """A loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def address() -> str:
    """Where this test's server listens."""
    return free_address()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """``run("flower-server", "--task", …)``: a process in the test's folder; killed when the test is over."""
    processes: list[subprocess.Popen[str]] = []

    def run_one(command: str | Path, *options: object) -> subprocess.Popen[str]:
        program = BIN / command if isinstance(command, str) else command
        process = subprocess.Popen(
            [program, *map(str, options)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Few and busy cores: a thread pool in each process would only slow the others down.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        return process

    yield run_one
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def hospital_file() -> Path:
    """The hospital charges, beside the checkout or where COTERIE_TEST_DATA says; not committed."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    file = Path(os.environ.get("COTERIE_TEST_DATA", beside)) / "hospital_charges_fy2011_10drgs.csv.xz"
    if not file.is_file():
        pytest.skip(f"needs {file.name} in a folder shared/data beside the checkout, or in COTERIE_TEST_DATA")
    return file
