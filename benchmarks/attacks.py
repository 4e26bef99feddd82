"""How long one image takes to reconstruct without noise, on one core. Run by hand on a quiet machine:

    python benchmarks/attacks.py --data femnist_digits.npz [--images 10]

CPU seconds of the whole attack, from the received update to the image, by the box-constrained attack (the audit's
control) at the task's random start. Limit to hold: 3 s an image for both networks. A converged image has 30 dB.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from coterie.attacks.cells import Cell, observation_for, run_cell
from coterie.attacks.metrics import CONVERGED_PSNR
from coterie.attacks.plan import AuditSettings, Condition, prepare

ATTACKS = ("box", "idlg", "map-class")
CONTROL = Condition(0.0, 1)


def main() -> None:
    """Print one line per network and attack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="FEMNIST's digits: LEAF json or .npz")
    parser.add_argument("--images", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        for model in ("lenet", "cnn"):
            material = prepare(AuditSettings(task="femnist", data=options.data, model=model, images=options.images))
            observations = [observation_for(material, CONTROL, batch) for batch in range(options.images)]
            for attack in ATTACKS:
                spans, converged, evaluations = [], 0, []
                for batch, observation in enumerate(observations):
                    began = time.process_time()
                    record = run_cell(material, Cell(attack, CONTROL, batch), observation)
                    spans.append(time.process_time() - began)
                    evaluations.append(record["evaluations"])
                    converged += record["rows"][0]["psnr"] >= CONVERGED_PSNR
                print(
                    f"{model:6s} {attack:10s} median {statistics.median(spans):6.2f} s, largest {max(spans):6.2f} s, "
                    f"{statistics.median(evaluations):5.0f} evaluations, {converged} of {options.images} converged",
                    flush=True,
                )


if __name__ == "__main__":
    main()
