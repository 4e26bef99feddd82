"""The reconstruction audit in full: LeNet and the 1,206,590-parameter network on FEMNIST's digits.

    python experiments/audit.py --data femnist_digits.npz          # every part; about two hours of one core
    python experiments/audit.py --data … --parts lenet,budgets     # some of them
    python experiments/audit.py --collect                          # only gather what is finished

Each part is one ``dlg-eval`` in a folder under ``--work``, and goes on where it was interrupted. What is finished is
gathered in ``experiments/results/audit/``. ``experiments/report.py`` then fills docs/audit.md.
"""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _results import RESULTS, table, write_result

from coterie.attacks.audit import run_audit
from coterie.attacks.plan import AuditSettings
from coterie.attacks.results import read_results
from coterie.mechanisms.events import Neighbourhood
from coterie.storage import write_atomically

NAME = "audit"
WORK = Path("runs") / "audit"
_KEPT = ("settings", "model", "candidates", "chances", "controls", "verdict", "conditions", "cells", "layers")
_MOST_REPORT = 2_000_000  # bytes of a committed report.html


def parts(data: Path) -> dict[str, AuditSettings]:
    """The audits by name, the most telling first."""
    base = AuditSettings(task="femnist", data=data, model="lenet", images=20)
    noise = (0.001, 0.1, 1.0, 3.0, 10.0)
    strong = ("box", "map-tv", "map-pca", "map-class", "label", "candidates", "cluster", "norm")
    return {
        "lenet": replace(base, noise_multipliers=noise, attacks=strong),
        "lenet-dlg-start": replace(
            base, init="dlg", noise_multipliers=(0.001, 0.1, 1.0, 3.0), attacks=("box", "map-class", "label")
        ),
        # Few images: the published attacks take fifty times as long for each as the others do.
        "published": replace(
            base, images=8, init="dlg", noise_multipliers=(0.001, 0.1, 1.0), attacks=("dlg", "idlg"), layers=False
        ),
        "cnn": replace(
            base,
            model="cnn",
            noise_multipliers=noise,
            attacks=("box", "map-pca", "map-class", "label", "candidates", "cluster", "norm"),
        ),
        "budgets": replace(
            base,
            images=200,
            noise_multipliers=(),
            local_epsilons=(1.0, 2.0, 4.0),
            neighbourhood=Neighbourhood.FIXED,
            attacks=("map-class", "candidates"),
            layers=False,
        ),
        "cnn-dlg-start": replace(
            base, model="cnn", init="dlg", noise_multipliers=(1.0,), attacks=("box", "map-class", "label"), layers=False
        ),
        "rounds": replace(
            base,
            noise_multipliers=(1.0, 3.0, 10.0),
            rounds=(1, 10, 100),
            attacks=("map-tv", "map-class", "label"),
            layers=False,
        ),
        "fixed": replace(
            base,
            noise_multipliers=(0.01, 0.1, 1.0, 3.0, 10.0),
            neighbourhood=Neighbourhood.FIXED,
            attacks=("map-class", "label", "candidates"),
        ),
        "batch": replace(
            base,
            images=16,
            batch_size=4,
            noise_multipliers=(0.1, 1.0),
            attacks=("map-tv", "map-class", "label"),
            layers=False,
        ),
        "steps": replace(
            base, images=10, local_steps=4, noise_multipliers=(0.1, 1.0), attacks=("map-tv", "map-class"), layers=False
        ),
        "cnn-rounds": replace(
            base,
            model="cnn",
            images=10,
            noise_multipliers=(1.0, 3.0),
            rounds=(1, 100),
            attacks=("map-class",),
            layers=False,
        ),
        "cnn-budgets": replace(
            base,
            model="cnn",
            images=200,
            noise_multipliers=(),
            local_epsilons=(1.0, 2.0, 4.0),
            neighbourhood=Neighbourhood.FIXED,
            attacks=("candidates",),
            layers=False,
        ),
    }


def main() -> None:
    """Run, and gather what is finished."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, help="FEMNIST's digits: LEAF json or .npz")
    parser.add_argument("--parts", help="names, with commas")
    parser.add_argument("--work", type=Path, default=WORK, help="where unfinished audits are kept")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--collect", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.collect:
        _collect(options.work)
        return
    if options.data is None:
        parser.error("Expected --data with FEMNIST's digits, found none")
    everything = parts(options.data)
    chosen = options.parts.split(",") if options.parts else list(everything)
    if unknown := [name for name in chosen if name not in everything]:
        parser.error(f"Expected --parts to be among {', '.join(everything)}, found {', '.join(unknown)}")
    for name in chosen:
        print(name, flush=True)
        run_audit(everything[name], options.work / name, processes=options.workers)
        _collect(options.work)


def _collect(work: Path) -> None:
    """``result.json``, and pictures and report of the parts that are finished."""
    found = {}
    for name in parts(Path()):
        if (path := work / name / "results.json").is_file():
            results = read_results(path)
            found[name] = {key: results[key] for key in _KEPT}
            found[name]["settings"] = {k: v for k, v in results["settings"].items() if k not in {"data", "trained"}}
    write_result(NAME, {"parts": found})
    for part, pictures in _PICTURES.items():
        for picture in pictures:
            if part in found and (source := work / part / picture).is_file():
                write_atomically(RESULTS / NAME / f"{part}-{picture}", source.read_bytes())
    report = work / "lenet" / "report.html"
    if report.is_file() and report.stat().st_size <= _MOST_REPORT:
        write_atomically(RESULTS / NAME / "report.html", report.read_bytes())


_PICTURES = {
    "published": ("images-dlg-T1.png",),
    "lenet": (
        "images-map-class-T1.png",
        "measures-T1.png",
        "rate-recognisable-T1.png",
        "rate-label-T1.png",
    ),
    "cnn": ("images-map-class-T1.png", "measures-T1.png", "rate-recognisable-T1.png"),
    "rounds": ("rounds.png",),
    "budgets": ("rate-identified-T1.png",),
}


def blocks(result: Any) -> dict[str, str]:
    """The measured parts of docs/audit.md."""
    found = result["parts"]
    return {
        "facts": _facts(found),
        **{name: _part(found[name]) if name in found else _MISSING for name in parts(Path())},
        "layers": _layers(found),
    }


_MISSING = "*Not run yet.*"


def _part(part: Mapping[str, Any]) -> str:
    settings, cells = part["settings"], part["cells"]
    noun = f"{settings['images']} images"
    levels = [
        x for x in ("full", "recognisable", "identified", "label", "cluster") if any(x in c["rates"] for c in cells)
    ]
    rows = [
        [
            cell["attack"],
            _noise(cell),
            str(cell["rounds"]),
            *(_share(cell["rates"].get(level)) for level in levels),
            *(f"{cell['medians'][m]:.{d}f}" if m in cell["medians"] else "–" for m, d in (("psnr", 1), ("ssim", 2))),
        ]
        for cell in cells
    ]
    controls = part["controls"]
    for key, name in (("class_mean", "*class-mean image*"), ("black", "*black image*")):
        medians = controls[key]
        rows.append([name, "", "", *([""] * len(levels)), f"{medians['psnr'][1]:.1f}", f"{medians['ssim'][1]:.2f}"])
    model = part["model"]
    head = ["attack", "ν", "T", *levels, "PSNR, dB", "SSIM"]
    said = " ".join([part["verdict"]["validity"], *part["verdict"]["found"]])
    stopped = "\n".join(f"- {line}" for line in part["verdict"]["stopped"])
    return (
        f"{model['parameters']:,} parameters, {model['start']}, {noun}, batch {settings['batch_size']}, "
        f"{settings['local_steps']} local step(s), {settings['neighbourhood']} neighbourhood; "
        f"seed {settings['seed']}.\n\n"
        f"{table(head, rows)}\n\n{said}\n\n{stopped}"
    )


def _noise(cell: Mapping[str, Any]) -> str:
    epsilon = cell["local_epsilon"]
    return (
        f"{cell['noise_multiplier']:.4g}" if epsilon is None else f"{cell['noise_multiplier']:,.0f} (ε = {epsilon:g})"
    )


def _share(rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        return "–"
    return f"{rate['hits']}/{rate['trials']} ({100 * rate['low']:.0f}–{100 * rate['high']:.0f} %)"


def _facts(found: Mapping[str, Mapping[str, Any]]) -> str:
    """What the audit was to show, and whether it did."""
    rows = [
        *_control_facts(found),
        *_fact(found, ("published",), "dlg", 0.001, "full", "full by plain DLG at ν = 0.001"),
        *_best(found, ("lenet", "cnn"), 0.001, "full", "full by the best attack at ν = 0.001", at_least=0.9),
        *_fact(found, ("published",), "dlg", 1.0, "recognisable", "recognisable by plain DLG at ν = 1", at_most=0.0),
        *_best(found, ("lenet", "cnn"), 1.0, "recognisable", "recognisable by the best attack at ν = 1", at_least=0.7),
        *_fact(found, ("lenet", "cnn"), "label", 3.0, "label", "class inferred at ν = 3", at_least=0.95),
        *_budget_facts(found),
    ]
    return table(["what", "expected", "measured", "holds"], rows) if rows else _MISSING


def _cell(part: Mapping[str, Any], attack: str, nu: float) -> Mapping[str, Any] | None:
    cells: Sequence[Mapping[str, Any]] = part["cells"]
    near = (c for c in cells if c["attack"] == attack and abs(c["noise_multiplier"] - nu) < 1e-9 and c["rounds"] == 1)
    return next(near, None)


def _control_facts(found: Mapping[str, Mapping[str, Any]]) -> Iterable[list[str]]:
    for name in ("lenet", "lenet-dlg-start", "cnn", "cnn-dlg-start"):
        if name not in found:
            continue
        controls = [c for c in found[name]["cells"] if c["noise_multiplier"] == 0 and "psnr" in c["medians"]]
        best = max(controls, key=lambda c: c["converged"]["hits"])
        yield _row(f"{name}: at least 30 dB at ν = 0 ({best['attack']})", best["converged"], at_least=0.9)


def _fact(
    found: Mapping[str, Mapping[str, Any]],
    names: Sequence[str],
    attack: str,
    nu: float,
    level: str,
    words: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Iterable[list[str]]:
    for name in names:
        if name in found and (cell := _cell(found[name], attack, nu)) is not None:
            yield _row(f"{name}: {words}", cell["rates"][level], at_least=at_least, at_most=at_most)


def _best(
    found: Mapping[str, Mapping[str, Any]], names: Sequence[str], nu: float, level: str, words: str, *, at_least: float
) -> Iterable[list[str]]:
    for name in names:
        cells = [] if name not in found else found[name]["cells"]
        own = [c for c in cells if abs(c["noise_multiplier"] - nu) < 1e-9 and c["rounds"] == 1 and level in c["rates"]]
        if own:
            best = max(own, key=lambda c: c["rates"][level]["hits"])
            yield _row(f"{name}: {words} ({best['attack']})", best["rates"][level], at_least=at_least)


def _budget_facts(found: Mapping[str, Mapping[str, Any]]) -> Iterable[list[str]]:
    """Identification under a guarantee: the interval must not lie above what the guarantee allows."""
    for name in ("budgets", "cnn-budgets"):
        for condition in [] if name not in found else found[name]["conditions"]:
            epsilon = condition["local_epsilon"]
            if epsilon is None:
                continue
            allowed = condition["price"]["most_identified"]
            for cell in found[name]["cells"]:
                if cell["local_epsilon"] != epsilon:
                    continue
                rate = cell["rates"]["identified"]
                yield [
                    f"{name}: identified by {cell['attack']}, local ε = {epsilon:g}",
                    f"at most {allowed:.1%}",
                    _share(rate),
                    "yes" if rate["low"] <= allowed else "**no**",
                ]
                if "recognisable" in cell["rates"]:
                    words = f"{name}: recognisable by {cell['attack']}, local ε = {epsilon:g}"
                    yield _row(words, cell["rates"]["recognisable"], at_most=0.0)


def _row(
    words: str, rate: Mapping[str, Any], *, at_least: float | None = None, at_most: float | None = None
) -> list[str]:
    share = rate["hits"] / rate["trials"]
    if at_least is not None:
        return [words, f"at least {at_least:.0%}", _share(rate), "yes" if share >= at_least else "**no**"]
    if at_most is not None:
        return [words, f"at most {at_most:.0%}", _share(rate), "yes" if share <= at_most else "**no**"]
    return [words, "–", _share(rate), "–"]


def _layers(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The predictor layer by layer, beside the attack with the same kind of prior."""
    tables = []
    for name in ("lenet", "cnn"):
        entries = [] if name not in found else [e for e in found[name]["layers"] if e["noise_multiplier"] >= 0.1]
        if not entries:
            continue
        noise = sorted({e["noise_multiplier"] for e in entries})
        rows = []
        for layer in dict.fromkeys(e["layer"] for e in entries):
            own = {e["noise_multiplier"]: e for e in entries if e["layer"] == layer}
            words = {"all": "all layers", "none": "prior alone"}.get(layer, layer)
            rows.append([words, f"{own[noise[0]]['parameters']:,}", *(f"{own[nu]['psnr']:.1f}" for nu in noise)])
        attacked = [_cell(found[name], "map-pca", nu) for nu in noise]
        rows.append(
            ["*attacked, map-pca*", "", *("–" if c is None else f"{c['medians']['psnr']:.1f}" for c in attacked)]
        )
        tables.append(
            f"{name}, PSNR in dB:\n\n" + table(["layer", "parameters", *(f"ν = {nu:g}" for nu in noise)], rows)
        )
    return "\n\n".join(tables) or _MISSING


if __name__ == "__main__":
    main()
