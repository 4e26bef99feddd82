"""The main job on real hospital data, as its user would run it: k = 3, then k = 1 on the same split.

    python experiments/main_job.py --data hospital_charges_fy2011_10drgs.csv.xz

Starts the real ``flower-server`` and ``flower-client --fleet`` on loopback, with the commands of the README, checks
every ledger against releases × 11/3, and writes ``experiments/main_job.json`` and the README's table.
"""

import argparse
import json
import math
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

BIN = Path(sysconfig.get_path("scripts"))
HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- main job: begin -->", "<!-- main job: end -->"
ADDRESS = "127.0.0.1:9092"


def one_run(hypotheses: int, fleet: int, data: Path, folder: Path) -> dict[str, Any]:
    """One server and one fleet; the summary, and the ledgers after it."""
    out = folder / f"runs/k{hypotheses}"
    server = subprocess.Popen(
        [
            *(BIN / "flower-server", "--listen", ADDRESS, "--task", "hospital", "--hypotheses", str(hypotheses)),
            *("--rounds", "20", "--clients-per-round", "100", "--min-clients", str(fleet), "--out", out),
        ]
    )
    clients = subprocess.Popen(
        [
            *(BIN / "flower-client", "--server", ADDRESS, "--task", "hospital", "--data", data),
            *("--partition-by", "provider", "--fleet", str(fleet), "--state", folder / "state"),
            *("--noise-multiplier", "3", "--budget", "200"),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        if server.wait() or clients.wait():
            sys.exit(f"server ended with {server.returncode}, clients with {clients.returncode}")
    finally:
        server.kill()
        clients.kill()
    listed = subprocess.run(
        [BIN / "coterie", "ledger", folder / "state", "--json"], check=True, capture_output=True, text=True
    )
    ledgers = json.loads(listed.stdout)
    for ledger in ledgers:
        if not math.isclose(ledger["pure_epsilon"], ledger["releases"] * 11 / 3, rel_tol=1e-12):
            sys.exit(f"ledger of {ledger['client']}: {ledger['pure_epsilon']} for {ledger['releases']} releases")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    del summary["models"]
    return {
        "fleet": fleet,
        "summary": summary,
        "ledgers": len(ledgers),
        "releases_in_ledgers": sum(ledger["releases"] for ledger in ledgers),
        "most_spent": max(ledger["pure_epsilon"] for ledger in ledgers),
    }


def table(runs: list[dict[str, Any]]) -> str:
    """The README's lines."""
    lines = [
        "| clients | held out | k | rounds | updates | RMSE in dollars, held-out clients | clients per hypothesis |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        s = run["summary"]
        counts = " / ".join(map(str, s["clients_per_hypothesis"]))
        lines.append(
            f"| {run['fleet']} | {s['validators']} | {s['hypotheses']} | {s['rounds']} | {s['updates']} | "
            f"{s['metric']:,.0f} | {counts} |"
        )
    checked, most = sum(run["ledgers"] for run in runs), max(run["most_spent"] for run in runs)
    lines += [
        "",
        f"After each run every ledger was read ({checked} readings): each holds releases × 11/3. The most that one",
        f"client spent over its two runs is {most:.4g} of 200. Written by",
        "`python experiments/main_job.py --data FILE`.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--fleets", type=int, nargs="+", default=[100, 300])
    arguments = parser.parse_args()
    runs = []
    for fleet in arguments.fleets:
        with tempfile.TemporaryDirectory() as folder:
            # One state folder for both: the same keys, so the same split; and ledgers that go on.
            runs += [one_run(k, fleet, arguments.data.resolve(), Path(folder)) for k in (3, 1)]
    (HERE / "main_job.json").write_text(json.dumps(runs, indent=1) + "\n")
    text = README.read_text()
    before, rest = text.split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table(runs)}\n{END}{rest.split(END)[1]}")
    print(table(runs))


if __name__ == "__main__":
    main()
