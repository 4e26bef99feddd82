"""``simulation.md`` from what ``simulation.py`` measured."""

import math
import statistics
from typing import Any

LOOP, PFL = "loop over the deployed functions", "pfl 0.6.0"


def page(found: dict[str, Any]) -> str:
    """The whole document."""
    lines = [
        "# The simulator: client-rounds a second, memory, and the hospital grid",
        "",
        "Written by `python benchmarks/simulation.py --data charges.csv.xz --pfl-python pfl-environment/bin/python`; "
        "the workloads, and what a client-round is, are said at the top of that file. A figure is the median of the "
        "repeats, with their range; a ratio is of two medians of the same run.",
    ]
    for name, table in (("h", _hospitals), ("f", _characters), ("million", _million), ("grid", _grid)):
        if name in found:
            lines += ["", *table(found[name]), "", _where(found[name])]
    return "\n".join(lines) + "\n"


def _where(case: dict[str, Any]) -> str:
    on = case["machine"]
    return (
        f"{case['date']}; {on['processor']}, {on['cores']} cores, Python {on['python']}, torch {on['torch']}; "
        f"load average before: {case['load_before']:.1f}."
    )


def _hospitals(case: dict[str, Any]) -> list[str]:
    rates = case["client_rounds_a_second"]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    lines = [
        "## Workload H: many small clients, one core",
        "",
        "| | client-rounds a second (range) | × loop | × pfl |",
        "|---|---|---|---|",
    ]
    for name, values in rates.items():
        over = f"{medians[name] / medians[PFL]:.1f}" if PFL in medians else "not measured"
        lines.append(f"| {name} | {_rate(values)} | {medians[name] / medians[LOOP]:.1f} | {over} |")
    return lines


def _characters(case: dict[str, Any]) -> list[str]:
    rates = case["client_rounds_a_second"]
    first = statistics.median(next(iter(rates.values())))
    lines = [
        "## Workload F: convolutions, all cores",
        "",
        "| | client-rounds a second (range) | × loop |",
        "|---|---|---|",
    ]
    for name, values in rates.items():
        lines.append(f"| {name} | {_rate(values)} | {statistics.median(values) / first:.2f} |")
    lines += [
        "",
        f"Instructions for bfloat16 on this processor: {', '.join(case['machine']['bfloat16']) or 'none'}. What a "
        "choice in bfloat16 changes, on the same hypotheses and rows:",
        "",
        "| hypotheses | clients | of them with another choice | its loss above the better one's, at most | "
        "median gap of the two losses |",
        "|---|---|---|---|---|",
    ]
    for name, other in case["other_choices"].items():
        lines.append(
            f"| {name} | {other['clients']} | {other['other']} ({other['other'] / other['clients']:.1%}) | "
            f"{other['largest_excess_loss']:.2%} | {other['median_gap']:.2%} |"
        )
    return lines


def _million(case: dict[str, Any]) -> list[str]:
    lines = [
        "## A million clients",
        "",
        "| N | U | held out | rounds | seconds | prices of all, seconds | largest and mean ε at δ = 1e-5 | "
        "memory with the rows | peak | above the rows |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in case["simulations"]:
        lines.append(
            f"| {one['clients']:,} | {one['sampled']:,} | {one['held']:.0%} | {one['rounds']} | {one['seconds']:.1f} | "
            f"{one['prices']:,} in {one['seconds_for_prices']:.2f} | "
            f"{_up(one['largest_tight'])}, {_up(one['mean_tight'])} | "
            f"{one['mb_with_data']:.0f} MB | {one['mb_peak']:.0f} MB | {one['mb_peak'] - one['mb_with_data']:.0f} MB |"
        )
    return lines


def _up(price: float) -> str:
    """Rounded up: a shown price must not be below the true one."""
    return f"{math.ceil(1000 * price) / 1000:.3f}"


def _grid(case: dict[str, Any]) -> list[str]:
    return [
        "## The hospital grid",
        "",
        f"{case['runs']} runs of 150 rounds in **{case['seconds']:.1f} s**: `{case['command']}`",
    ]


def _rate(values: list[float]) -> str:
    digits = 0 if min(values) >= 100 else 1
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"
