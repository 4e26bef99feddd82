"""Seconds a round, memory a client and server CPU a client-round of the deployed processes, beside stock SuperNodes.

    python benchmarks/deployed.py --data charges.csv.xz     # writes benchmarks/deployed.md and deployed.json
    python benchmarks/deployed.py --data charges.csv.xz --clients 8 --no-stock

Task hospital (11 parameters, k = 3, one client a provider), every client trains in every round, no validation. PSS is
the proportional set size of /proc/PID/smaps_rollup: pages that processes share are divided among them, so that it
falls as the fleet grows. Run it on a quiet machine.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BIN = Path(sysconfig.get_path("scripts"))
HERE = Path(__file__).resolve().parent
ROUNDS, STOCK_ROUNDS, STOCK_NODES = 12, 4, 2
ADDRESS = "127.0.0.1:9392"
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def pss_mb(process: int) -> float:
    """Proportional set size in MB."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no Pss for {process}")


def children(process: int) -> list[int]:
    """The child processes of a process."""
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def history(folder: Path) -> list[dict[str, Any]]:
    """The rounds that a run has finished."""
    file = folder / "history.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_rounds(folder: Path, rounds: int, seconds: float) -> None:
    """Until a run has finished so many rounds."""
    deadline = time.monotonic() + seconds
    while len(history(folder)) < rounds:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{rounds} rounds in {folder}")
        time.sleep(0.02)


def warm(clients: int, folder: Path, data: Path) -> dict[str, Any]:
    """``flower-server`` and a fleet of ``clients``."""
    out = folder / "out"
    server = subprocess.Popen(
        [
            *(BIN / "flower-server", "--task", "hospital", "--listen", ADDRESS, "--hypotheses", "3"),
            *("--rounds", str(ROUNDS), "--clients-per-round", str(clients), "--min-clients", str(clients)),
            *("--validation-fraction", "0", "--out", out),
        ],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    fleet = subprocess.Popen(
        [
            *(BIN / "flower-client", "--task", "hospital", "--server", ADDRESS, "--fleet", str(clients)),
            *("--data", data, "--partition-by", "provider"),
            *("--state", folder / "state", "--noise-multiplier", "5", "--budget", "1000000"),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_rounds(out, 2, 300)
        before = cpu_seconds(server.pid)
        wait_for_rounds(out, ROUNDS - 2, 300)
        used = cpu_seconds(server.pid) - before
        memory = [pss_mb(child) for child in children(fleet.pid)]
        parent = pss_mb(fleet.pid)
        server.wait(60)
        fleet.wait(60)
    finally:
        server.kill()
        fleet.kill()
    done = history(out)
    seconds = [record["seconds"] for record in done[1:]]
    return {
        "clients": clients,
        "kind": "coterie",
        "seconds_a_round": statistics.median(seconds),
        "seconds_a_round_range": [min(seconds), max(seconds)],
        "updates": sum(sum(record["clients_per_hypothesis"]) for record in done),
        "pss_mb_a_client": statistics.median(memory),
        "pss_mb_largest": max(memory),
        "pss_mb_fleet_parent": parent,
        "server_cpu_ms_a_client_round": 1000 * used / ((ROUNDS - 4) * clients),
    }


@contextmanager
def background(folder: Path, name: str, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the stock path."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "FLWR_HOME": str(folder / "flower")}
    environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def stock(folder: Path, data: Path) -> dict[str, Any]:
    """The stock SuperLink, two SuperNodes and ``flwr run``, with the same apps, task and model."""
    (folder / "flower").mkdir()
    (folder / "flower/config.toml").write_text(
        f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "{ADDRESS}"\ninsecure = true\n'
    )
    host, _, port = ADDRESS.partition(":")
    out = folder / "out"
    settings = (
        f'task="hospital" data="{data}" partition-by="provider" state="{folder}/state" noise-multiplier=5 '
        f"budget=1000000 num-partitions={STOCK_NODES}"
    )
    link = ("--insecure", "--host", host, "--port", port, "--disable-runtime-dependency-installation")
    with background(folder, "superlink", "flower-superlink", *link):
        nodes = [
            background(
                *(folder, f"node{i}", "flower-supernode", "--insecure", "--superlink", ADDRESS),
                *("--port", int(port) + 1 + i, "--node-config", f"{settings} partition-id={i}"),
            )
            for i in range(STOCK_NODES)
        ]
        with nodes[0], nodes[1]:
            while (folder / "superlink.log").read_text().count("Activated node_id") < STOCK_NODES:
                time.sleep(0.2)
            bundle = HERE.parent / "deploy" / "flower-app"
            run_config = f'task="hospital" rounds={STOCK_ROUNDS} hypotheses=3 out="{out}"'
            with background(folder, "run", "flwr", "run", bundle, "local", "--stream", "--run-config", run_config):
                wait_for_rounds(out, STOCK_ROUNDS, 600)
    seconds = [record["seconds"] for record in history(out)[1:]]
    return {
        "clients": STOCK_NODES,
        "kind": "stock SuperNode",
        "seconds_a_round": statistics.median(seconds),
        "seconds_a_round_range": [min(seconds), max(seconds)],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The result as Markdown."""
    lines = [
        "# The deployed processes: time, memory, server CPU",
        "",
        "Written by `python benchmarks/deployed.py`; what is measured is said at the top of that file. "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}. Clients and server share the cores.",
        "",
        "| processes | clients | seconds a round, median (range) | client-rounds a second | "
        "PSS a client, median (largest) | server CPU a client-round |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["seconds_a_round_range"]
        memory = f"{row['pss_mb_a_client']:.1f} MB ({row['pss_mb_largest']:.1f})" if "pss_mb_a_client" in row else "-"
        cpu = f"{row['server_cpu_ms_a_client_round']:.1f} ms" if "server_cpu_ms_a_client_round" in row else "-"
        lines.append(
            f"| {row['kind']} | {row['clients']} | {row['seconds_a_round']:.2f} ({low:.2f}–{high:.2f}) | "
            f"{row['clients'] / row['seconds_a_round']:.2f} | {memory} | {cpu} |"
        )
    by_kind = {(row["kind"], row["clients"]): row["seconds_a_round"] for row in rows}
    if (base := by_kind.get(("stock SuperNode", STOCK_NODES))) and (same := by_kind.get(("coterie", STOCK_NODES))):
        lines += [
            "",
            f"With {STOCK_NODES} clients, coterie's rounds are {base / same:.0f} times as fast as the stock path's.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 8, 32, 100])
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--data", type=Path, required=True, help="the CMS hospital charges")
    arguments = parser.parse_args()
    data, rows = arguments.data.resolve(), []
    for clients in arguments.clients:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(warm(clients, Path(folder), data))
            print(rows[-1], flush=True)
    if arguments.stock:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(stock(Path(folder), data))
            print(rows[-1], flush=True)
        (HERE / "deployed.json").write_text(json.dumps(rows, indent=1) + "\n")
        (HERE / "deployed.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
