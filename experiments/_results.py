"""What the experiments share: where results are kept, how they are written, tables, and the look of pictures."""

import io
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.storage import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOCUMENT = HERE.parent / "docs" / "experiments.md"
AUDIT_DOCUMENT = HERE.parent / "docs" / "audit.md"
AUDIT = frozenset({"audit", "figure5"})  # the results that have their place there

# Okabe and Ito's palette, made to be told apart with any kind of colour vision; black last.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def read_result(name: str) -> Any:
    """The content of results/NAME/result.json."""
    return json.loads((RESULTS / name / "result.json").read_text(encoding="utf-8"))


def write_result(name: str, result: Any, folder: Path | None = None) -> None:
    """Write results/NAME/result.json, or into ``folder``: floats with six digits, null for what is not finite."""
    write_atomically(_folder(name, folder) / "result.json", (_pretty(_plain(result)) + "\n").encode())


def write_figure(name: str, file: str, figure: "Figure", folder: Path | None = None) -> None:
    """Write a picture beside the result."""
    image = io.BytesIO()
    figure.savefig(image, dpi=110, format="png", metadata={"Software": None})
    write_atomically(_folder(name, folder) / file, image.getvalue())


def new_figure(columns: int = 1, *, height: float = 4.0, share_y: bool = False) -> tuple["Figure", list[Any]]:
    """A figure with ``columns`` axes side by side, each with a light grid."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, columns, figsize=(5.2 * columns + 1, height), layout="constrained", squeeze=False, sharey=share_y
    )
    for one in axes[0]:
        one.grid(alpha=0.3)
    return figure, list(axes[0])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned and the others right-aligned."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of at most 120 characters, all but the first indented."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def price(value: float | None, digits: int = 6) -> float | None:
    """A price with so many digits, rounded up: what is kept must not be below the true one. None: no bound."""
    if value is None or not math.isfinite(value):
        return None
    if value == 0:
        return 0.0
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    # A float that is a last bit above a short decimal is that decimal.
    return round(math.ceil(value * 10.0**decimals * (1 - 1e-14)) / 10.0**decimals, max(decimals, 0))


def rounded_up(value: float | None, digits: int = 3) -> str:
    """``price`` as text."""
    short = price(value, digits)
    if short is None:
        return "no bound"
    decimals = digits - 1 - math.floor(math.log10(short)) if short else 0
    return f"{short:,.{max(decimals, 0)}f}"


def _folder(name: str, folder: Path | None) -> Path:
    found = folder or RESULTS / name
    found.mkdir(parents=True, exist_ok=True)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with a line for each innermost list or object, so that a change can be read in a diff."""
    if isinstance(value, dict | list) and any(isinstance(item, dict | list) for item in _items(value)):
        inner = indent + " "
        if isinstance(value, dict):
            parts = [f"{inner}{json.dumps(key)}: {_pretty(item, inner)}" for key, item in value.items()]
            return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
        return "[\n" + ",\n".join(inner + _pretty(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
