"""``make demo``: one server and 20 clients on this machine, k = 2 against one shared model, and what it cost.

Real processes, real sockets, real noise. The data are scikit-learn's handwritten digits, dealt to 20 clients, every
second one's images turned by 90°.
"""

import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CLIENTS = 20
TRAINERS = 14  # the other six are held out
ROUNDS = 20
NOISE_MULTIPLIER = 5
BUDGET = 5000
FOLDER = Path("demo-run")
BIN = Path(sysconfig.get_path("scripts"))

console = Console()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def federate(hypotheses: int, out: Path) -> dict[str, Any]:
    """One run with real processes; the server's lines are shown as they come. Its summary."""
    address = f"127.0.0.1:{free_port()}"
    server_command = [
        *(str(BIN / "flower-server"), "--task", "digits", "--listen", address, "--hypotheses", str(hypotheses)),
        *("--rounds", str(ROUNDS), "--clients-per-round", str(TRAINERS), "--min-clients", str(CLIENTS)),
        *("--validation-fraction", "0.3", "--validate-every", "5", "--reseed-after", "3", "--out", str(out)),
    ]
    client_command = [
        *(str(BIN / "flower-client"), "--task", "digits", "--server", address, "--fleet", str(CLIENTS)),
        *("--state", str(FOLDER / "state"), "--noise-multiplier", str(NOISE_MULTIPLIER), "--budget", str(BUDGET)),
    ]
    console.print(f"\n[bold]k = {hypotheses}[/bold]")
    console.print("$ " + " ".join(["flower-server", *server_command[1:]]), highlight=False, style="dim")
    console.print("$ " + " ".join(["flower-client", *client_command[1:]]), highlight=False, style="dim")
    log = out.with_suffix(".clients.log")
    with log.open("w") as clients_log:
        server = subprocess.Popen(server_command, stdout=subprocess.DEVNULL)
        clients = subprocess.Popen(client_command, stdout=clients_log, stderr=subprocess.STDOUT)
        try:
            while server.poll() is None:
                if (status := clients.poll()) not in (None, 0):
                    sys.exit(f"demo: the clients ended with status {status}, see {log}")
                time.sleep(0.1)
            clients.wait(60)
        finally:
            for process in (clients, server):
                process.terminate()
                process.wait(20)
    if server.returncode or clients.returncode:
        sys.exit(f"demo: server ended with status {server.returncode}, clients with {clients.returncode}, see {log}")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    summary["cards"] = [json.loads(path.read_text()) for path in sorted((FOLDER / "state").glob("*/model.json"))]
    return summary


def main() -> None:
    """Two federations on the same 20 clients, then four answers."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    shared = federate(1, FOLDER / "shared")
    personal = federate(2, FOLDER / "personalized")

    accuracy = Table(title=f"Accuracy after {ROUNDS} rounds at ν = {NOISE_MULTIPLIER}")
    accuracy.add_column("models")
    held_out = personal["validators"]
    accuracy.add_column(f"{held_out} held-out clients, never trained on", justify="right")
    accuracy.add_column(f"all {CLIENTS} clients' own rows", justify="right")
    for name, run in (("one shared model (k = 1)", shared), ("two hypotheses (k = 2)", personal)):
        own = sum(card["metric"] for card in run["cards"]) / len(run["cards"])
        accuracy.add_row(name, f"{run['metric']:.1f} %", f"{own:.1f} %")

    clusters = Table(title="Who ended with which hypothesis (k = 2)")
    clusters.add_column("hypothesis", justify="right")
    clusters.add_column("clients")
    for j in range(2):
        names = [card["client"] for card in personal["cards"] if card["hypothesis"] == j]
        clusters.add_row(str(j), ", ".join(names) or "nobody")

    console.print()
    console.print(accuracy)
    console.print(clusters)
    subprocess.run([BIN / "coterie", "ledger", FOLDER / "state"], check=True)
    console.print(
        f"Both runs are in the ledgers: they belong to the data, not to a run. One release of this 650-number model "
        f"costs 650/{NOISE_MULTIPLIER} = {650 / NOISE_MULTIPLIER:g} of pure ε: a weak guarantee. A smaller model or a "
        f"larger ν makes it stronger (docs/privacy.md)."
    )
    console.print(f"The models: {FOLDER}/personalized/hypothesis-*.safetensors (the server's), and each client's own,")
    console.print(f"            {FOLDER}/state/<client>/model.safetensors, with a card beside it (model.json).")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
