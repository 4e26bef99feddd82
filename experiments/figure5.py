"""Figure 5 of arXiv 2206.03396 rebuilt: what DLG, and a stronger attack, make of FEMNIST's digits at each ν.

    python experiments/figure5.py --data femnist_digits.npz     # about a quarter of an hour of one core
    python experiments/figure5.py --collect                     # only gather what is finished

The network is the 1,206,590-parameter one with sigmoids and averaging, at its random start and trained on the digits
that are not attacked. Noise is layer-wise L2 Laplace in the paper's relative neighbourhood, one image, one step.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _results import RESULTS, table, write_result

from coterie.attacks.audit import run_audit
from coterie.attacks.metrics import FULL_PSNR
from coterie.attacks.plan import AuditSettings, Material, prepare
from coterie.attacks.results import read_results
from coterie.models import save_model
from coterie.parameters import to_vector
from coterie.rng import seeded
from coterie.storage import write_atomically

NAME = "figure5"
WORK = Path("runs") / "figure5"
NOISE = (0.001, 0.01, 0.1, 1.0, 3.0, 5.0, 10.0)
ATTACKS = ("dlg", "map-class")
EPOCHS, BATCH, RATE = 3, 50, 1e-3  # of training the attacked weights, by Adam


def settings_for(data: Path, trained: Path | None = None) -> AuditSettings:
    """The audit of one kind of weights."""
    return AuditSettings(
        task="femnist",
        data=data,
        model="cnn",
        images=6,
        noise_multipliers=NOISE,
        attacks=ATTACKS,
        trained=trained,
        layers=False,
    )


def train(material: Material, path: Path) -> float:
    """Train the network on nine tenths of the rows that are not attacked; returns its accuracy on the last tenth."""
    rng = seeded(0, "figure5", "training")
    module = material.task.initialise(rng)
    pool, held = len(material.pool) * 9 // 10, len(material.pool)
    optimizer = torch.optim.Adam(module.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for batch in torch.from_numpy(rng.permutation(pool)).split(BATCH):
            loss = material.task.loss(module(material.pool.inputs[batch]), material.pool.targets[batch]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    save_model(path, "femnist", to_vector(module), material.model.layout)
    with torch.no_grad():
        right = [
            module(x).argmax(dim=1) == y
            for x, y in zip(
                material.pool.inputs[pool:held].split(100), material.pool.targets[pool:held].split(100), strict=True
            )
        ]
    return float(torch.cat(right).double().mean())


def main() -> None:
    """Train, attack, gather."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, help="FEMNIST's digits: LEAF json or .npz")
    parser.add_argument("--work", type=Path, default=WORK, help="where an unfinished run is kept")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--collect", action="store_true", help="run nothing")
    options = parser.parse_args()
    work: Path = options.work
    if not options.collect:
        if options.data is None:
            parser.error("Expected --data with FEMNIST's digits, found none")
        run_audit(settings_for(options.data), work / "untrained", processes=options.workers)
        weights, said = work / "trained.safetensors", work / "accuracy"
        if not said.is_file():
            accuracy = train(prepare(settings_for(options.data)), weights)
            write_atomically(said, f"{accuracy}\n".encode())
        trained = replace(settings_for(options.data), trained=weights)
        run_audit(trained, work / "trained", processes=options.workers)
    collect(work)


def collect(work: Path) -> None:
    """``result.json`` and the pictures, of what is finished."""
    result: dict[str, Any] = {"noise_multipliers": NOISE, "epochs": EPOCHS, "weights": {}}
    if (said := work / "accuracy").is_file():
        result["accuracy"] = float(said.read_text())
    for kind in ("untrained", "trained"):
        if not (work / kind / "results.json").is_file():
            continue
        found = read_results(work / kind / "results.json")
        result["weights"][kind] = {key: found[key] for key in ("cells", "controls", "verdict", "rows")}
        for attack in ATTACKS:
            picture = (work / kind / f"images-{attack}-T1.png").read_bytes()
            (RESULTS / NAME).mkdir(parents=True, exist_ok=True)
            write_atomically(RESULTS / NAME / f"{kind}-{attack}.png", picture)
    write_result(NAME, result)


def blocks(result: Any) -> dict[str, str]:
    """The measured part of docs/audit.md."""
    if not result["weights"]:
        return {"grid": "*Not run yet.*"}
    return {"grid": "\n\n".join([_pictures(result), _table(result), _paragraph(result)])}


def _pictures(result: Mapping[str, Any]) -> str:
    return "\n\n".join(
        f"![{attack}, {kind} weights: originals and what {attack} makes of them at ν = "
        f"{', '.join(f'{nu:g}' for nu in result['noise_multipliers'])}]"
        f"(../experiments/results/figure5/{kind}-{attack}.png)"
        for kind in result["weights"]
        for attack in ATTACKS
    )


def _table(result: Mapping[str, Any]) -> str:
    noise: Sequence[float] = (0.0, *result["noise_multipliers"])
    rows = []
    for kind, found in result["weights"].items():
        for attack in ATTACKS:
            cells = {c["noise_multiplier"]: c for c in found["cells"] if c["attack"] == attack}
            row = [f"{cells[nu]['medians']['psnr']:.1f} / {cells[nu]['medians']['ssim']:.2f}" for nu in noise]
            rows.append([f"{attack}, {kind} weights", *row])
        mean = found["controls"]["class_mean"]
        rows.append(
            ["*class-mean image*", f"{mean['psnr'][1]:.1f} / {mean['ssim'][1]:.2f}", *([""] * (len(noise) - 1))]
        )
    head = ["median PSNR in dB / SSIM", *(f"ν = {nu:g}" for nu in noise)]
    return table(head, rows)


def _paragraph(result: Mapping[str, Any]) -> str:
    """Up to which tested ν each attack reconstructs or makes recognisable."""
    sentences = []
    for kind, found in result["weights"].items():
        for attack in ATTACKS:
            cells = [c for c in found["cells"] if c["attack"] == attack]
            sentences.append(
                f"With {kind} weights {attack} reached {FULL_PSNR:g} dB and SSIM 0.9 on at least one image up to "
                f"{_largest(cells, 'full')}, and made at least one recognisable up to "
                f"{_largest(cells, 'recognisable')}."
            )
    if "accuracy" in result:
        sentences.append(
            f"The trained weights saw {result['epochs']} passes of the digits that are not attacked and are right on "
            f"{result['accuracy']:.1%} of held-out ones."
        )
    return " ".join(sentences)


def _largest(cells: Sequence[Mapping[str, Any]], level: str) -> str:
    found = max((c["noise_multiplier"] for c in cells if c["rates"][level]["hits"]), default=-math.inf)
    return "no tested ν, not even 0" if found < 0 else f"ν = {found:g}"


if __name__ == "__main__":
    main()
