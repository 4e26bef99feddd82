"""The main job on real hospital data, as its user would run it: k = 3, then k = 1 on the same split.

    python experiments/main_job.py --data hospital_charges_fy2011_10drgs.csv.xz

Starts the real ``flower-server`` and ``flower-client --fleet`` on loopback, with the commands of the README, checks
every ledger against releases × 11/3, and writes ``experiments/main_job.json`` and the README's table.
"""

import argparse
import json
import math
import statistics
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
    """The README's lines: every pair of runs, then the medians."""
    lines = [
        "| run | k | rounds | updates | RMSE in dollars, held-out clients | clients per hypothesis |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        s = run["summary"]
        counts = " / ".join(map(str, s["clients_per_hypothesis"]))
        lines.append(
            f"| {run['pair']} | {s['hypotheses']} | {s['rounds']} | {s['updates']} | {s['metric']:,.0f} | {counts} |"
        )
    for k in sorted({run["summary"]["hypotheses"] for run in runs}, reverse=True):
        metrics = [run["summary"]["metric"] for run in runs if run["summary"]["hypotheses"] == k]
        lines.append(f"| median | {k} | | | **{statistics.median(metrics):,.0f}** | |")
    checked, most = sum(run["ledgers"] for run in runs), max(run["most_spent"] for run in runs)
    lines += [
        "",
        f"{runs[0]['fleet']} clients, of whom {runs[0]['summary']['validators']} are held out. Runs of one number have",
        "the same clients and the same split, and go on in the same ledgers; other numbers are other splits. The noise",
        f"is real in each. After each run every ledger was read ({checked} readings): each holds releases × 11/3. The",
        f"most that one client spent over its two runs is {most:.4g} of 200. Written by",
        "`python experiments/main_job.py --data FILE`.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--fleet", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    runs = []
    for pair in range(1, arguments.repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            # One state folder for both: the same keys, so the same split; and ledgers that go on.
            for k in (3, 1):
                run = one_run(k, arguments.fleet, arguments.data.resolve(), Path(folder))
                runs.append({"pair": pair, **run})
    (HERE / "main_job.json").write_text(json.dumps(runs, indent=1) + "\n")
    text = README.read_text()
    before, rest = text.split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table(runs)}\n{END}{rest.split(END)[1]}")
    print(table(runs))


if __name__ == "__main__":
    main()
