"""Run by ``.ci/run`` from outside the checkout, with the built wheel in a clean environment."""

import json
import socket
import subprocess
import sys
import sysconfig
from importlib.metadata import files
from pathlib import Path

import coterie

BIN = Path(sysconfig.get_path("scripts"))


def test_the_package_is_the_installed_one_with_all_four_linked_folders() -> None:
    assert Path(coterie.__file__).is_relative_to(sysconfig.get_path("purelib"))
    installed = {str(path) for path in files("coterie") or ()}
    for folder in ("server", "client", "mechanisms", "attacks"):
        assert f"coterie/{folder}/__init__.py" in installed
    assert not any(path.split("/")[0] in {"server", "client", "mechanisms", "attacks"} for path in installed)


def test_a_federation_runs_with_the_installed_commands(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = ["--task", "synthetic"]
    server = subprocess.Popen(
        [
            *(BIN / "flower-server", *common, "--listen", address, "--hypotheses", "2", "--rounds", "2"),
            *("--clients-per-round", "3", "--min-clients", "4", "--out", tmp_path / "out"),
        ],
        stderr=sys.stderr,
    )
    try:
        fleet = [
            BIN / "flower-client",
            *common,
            "--server",
            address,
            "--fleet",
            "4",
            "--state",
            str(tmp_path / "state"),
        ]
        subprocess.run([*fleet, "--noise-multiplier", "2", "--budget", "10"], check=True, timeout=200)
        assert server.wait(60) == 0
    finally:
        server.kill()
    listed = subprocess.run(
        [BIN / "coterie", "ledger", tmp_path / "state", "--json"], check=True, capture_output=True, text=True
    )
    assert sum(client["releases"] for client in json.loads(listed.stdout)) == 6
