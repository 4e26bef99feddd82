"""The stock Flower path: flower-superlink, flower-supernode and flwr run, with coterie's apps in the environment."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.federation.conftest import BIN, PATIENCE, free_address

BUNDLE = Path(__file__).resolve().parents[2] / "deploy" / "flower-app"
ROUNDS = 2


@contextmanager
def running(folder: Path, name: str, *command: object) -> Iterator[None]:
    """A process of the stock path, its output in a file of the test's folder."""
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(folder / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            list(map(str, command)), cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until(condition: Callable[[], bool], folder: Path) -> None:
    """Wait for the condition; fail with the end of every log."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log"))))
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_stock_supernodes_train_and_keep_their_ledgers(tmp_path: Path) -> None:
    address = free_address()
    host, _, port = address.partition(":")
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower/config.toml").write_text(
        f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "{address}"\ninsecure = true\n'
    )
    settings = f'task="digits" state="{tmp_path}/state" noise-multiplier=5 budget=1000 num-partitions=2'
    link = ("--insecure", "--host", host, "--port", port, "--disable-runtime-dependency-installation")
    with running(tmp_path, "superlink", "flower-superlink", *link):
        nodes = [
            running(
                *(tmp_path, f"supernode{i}", "flower-supernode", "--insecure", "--superlink", address),
                *("--port", free_address().partition(":")[2], "--node-config", f"{settings} partition-id={i}"),
            )
            for i in range(2)
        ]
        with nodes[0], nodes[1]:
            summary = tmp_path / "out" / "summary.json"
            run_config = f'rounds={ROUNDS} out="{summary.parent}"'
            command = ("flwr", "run", BUNDLE, "local", "--stream", "--run-config", run_config)
            # `flwr run` does not wait for a SuperLink that is still starting.
            until(lambda: (tmp_path / "superlink.log").read_text().count("Activated node_id") == 2, tmp_path)
            with running(tmp_path, "run", *command):
                until(summary.exists, tmp_path)
    told = json.loads(summary.read_text())
    assert told["rounds"] == ROUNDS
    assert told["updates"] == told["models_delivered"] * ROUNDS == 2 * ROUNDS
    listed = subprocess.run(
        [BIN / "coterie", "ledger", tmp_path / "state", "--json"], check=True, capture_output=True, text=True
    )
    for ledger in json.loads(listed.stdout):
        assert ledger["releases"] == ROUNDS
        assert ledger["pure_epsilon"] == pytest.approx(ROUNDS * 650 / 5, rel=1e-12)
    assert len(list((tmp_path / "state").glob("*/model.safetensors"))) == 2
