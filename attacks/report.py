"""``report.html``: one file with the pictures inside, readable on a phone, in the dark, and by a screen reader."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from coterie.attacks.pictures import Picture
from coterie.attacks.verdict import COLUMN_CRITERION, CRITERION, LEVELS

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --box: #f6f8fa;
  --bad: #a40e26; --good: #116329; --doubt: #7d4e00; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --soft: #9aa4af; --line: #30363d;
  --box: #161b22; --bad: #ff9a9a; --good: #7ee787; --doubt: #f2cc60; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
.verdict { border: 1px solid var(--line); border-left: .4rem solid var(--tone); background: var(--box);
  padding: .4rem 1rem; border-radius: .3rem; }
.verdict strong { color: var(--tone); }
.invalid, .leak { --tone: var(--bad); } .nothing { --tone: var(--good); } .unknown { --tone: var(--doubt); }
.wide { overflow-x: auto; } .wide:focus-visible { outline: 2px solid var(--soft); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td small { color: var(--soft); }
tr.hit td.hit { color: var(--bad); font-weight: 600; }
figure { margin: 1.2rem 0; } figcaption { color: var(--soft); font-size: .9rem; }
img { max-width: 100%; height: auto; background: #ffffff; border: 1px solid var(--line); border-radius: .3rem; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1rem; } li { margin: .25rem 0; }
.note { color: var(--soft); font-size: .9rem; }
"""

_TITLES = {
    "full": "full",
    "recognisable": "recognisable",
    "identified": "identified",
    "label": "class",
    "cluster": "hypothesis",
}


def report_of(results: Mapping[str, Any], pictures: Sequence[Picture]) -> str:
    """The whole page. It loads nothing from anywhere."""
    settings, verdict = results["settings"], results["verdict"]
    title = f"Reconstruction audit of {settings['task']}"
    sections = [
        _section("What was tried", _tried(results)),
        _section("Findings", _findings(verdict)),
        _section("Figures", _criterion(results) + cells_table(results) + _prices(results) + _columns(results)),
        _section("Pictures", "".join(map(_figure, pictures)) or "<p>None for these attacks.</p>"),
        _section("What guesses reach without any attack", _controls(results)),
    ]
    if results["layers"]:
        sections.insert(4, _section("Where it leaks, layer by layer", _layers(results)))
    if results["notes"]:
        sections.append(_section("Notes", _list(results["notes"])))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{_verdict_box(verdict)}\n" + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


def _verdict_box(verdict: Mapping[str, Any]) -> str:
    tone = "leak" if verdict["found"] else "nothing"
    word = "These attacks found leaks." if verdict["found"] else "These attacks found no leak at the noise tested."
    if not verdict["valid"]:
        tone = "invalid" if verdict["valid"] is False else "unknown"
        word = "Invalid." if verdict["valid"] is False else "Without a control."
        word += " Leaks were found all the same." if verdict["found"] else ""
    return (
        f'<div class="verdict {tone}"><p><strong>{word}</strong> {escape(verdict["validity"])}</p>'
        "<p>An audit shows what the attacks it tried can do. It cannot show that there is no better one.</p></div>"
    )


def _tried(results: Mapping[str, Any]) -> str:
    settings, model = results["settings"], results["model"]
    noun = results["noun"]
    batch = settings["batch_size"]
    mode = (
        "fixed: every update is clipped to a public radius, and the noise is d-private"
        if settings["neighbourhood"] == "fixed"
        else "relative: the noise follows the private update, as in the paper; no guarantee follows from it"
    )
    items = {
        "Model": f"{model['name']}, {model['parameters']:,} parameters, {model['start']}",
        "Rows": f"{settings['images']} {noun}, {batch} in a batch, {settings['local_steps']} local steps",
        "Neighbourhood": mode,
        "Noise": "each layer by itself" if settings["granularity"] == "layer" else "the whole update as one vector",
        "The server knows": "the weights that it sent, the training settings, the mechanism and ν; "
        + ("no other rows" if settings["prior"] == "none" else "and other people's rows of the same kind"),
        "Seed": str(settings["seed"]),
    }
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in items.items()) + "</dl>"


def _findings(verdict: Mapping[str, Any]) -> str:
    found = _list(verdict["found"]) if verdict["found"] else "<p>None of these attacks found a leak.</p>"
    stopped = _list(verdict["stopped"]) if verdict["stopped"] else "<p>None of the noise tested stopped an attack.</p>"
    return f"<h3>Leaks</h3>{found}<h3>What these attacks did not do</h3>{stopped}"


def _criterion(results: Mapping[str, Any]) -> str:
    words = CRITERION if results["noun"] == "images" else COLUMN_CRITERION
    levels = [level for level in LEVELS if any(level in cell["rates"] for cell in results["cells"])]
    size = results["candidates"]
    entries = "".join(f"<dt>{_TITLES[level]}</dt><dd>{escape(words[level])}</dd>" for level in levels)
    return f'<dl>{entries}</dl><p class="note">Identification chooses among {size} rows here.</p>'


def cells_table(results: Mapping[str, Any]) -> str:
    """Every attack under every condition, as an HTML table."""
    cells = results["cells"]
    levels = [level for level in LEVELS if any(level in cell["rates"] for cell in cells)]
    measures = [m for m in ("psnr", "ssim", "correlation", "error") if any(m in cell["medians"] for cell in cells)]
    names = {"psnr": "PSNR, dB", "ssim": "SSIM", "correlation": "correlation", "error": "error, sd"}
    head = ["attack", "ν", "T", *(_TITLES[level] for level in levels), *(names[m] for m in measures)]
    rows = []
    for cell in cells:
        first = [_cell(escape(cell["attack"])), _cell(noise_of(cell)), _cell(str(cell["rounds"]))]
        rates = [_rate(cell["rates"].get(level)) for level in levels]
        medians = [_cell(f"{cell['medians'][m]:.3g}" if m in cell["medians"] else "–") for m in measures]
        rows.append(f'<tr class="hit">{"".join(first + rates + medians)}</tr>')
    caption = "Hits of trials, with 95 % intervals (Wilson) in small print; medians over rows. ν = 0 is the control."
    return _table(caption, head, rows)


def noise_of(cell: Mapping[str, Any]) -> str:
    """ν, and the local ε that it was found from."""
    epsilon = cell["local_epsilon"]
    return f"{cell['noise_multiplier']:.4g}" + ("" if epsilon is None else f" (local ε {epsilon:g})")


def _prices(results: Mapping[str, Any]) -> str:
    priced = [condition for condition in results["conditions"] if condition["price"]]
    if not priced:
        return ""
    rows = [
        "<tr>"
        + _cell(noise_of(condition))
        + _cell(str(condition["rounds"]))
        + _cell(_number(condition["price"]["local_pure"]))
        + _cell(_number(condition["price"]["local_tight"]))
        + _cell(f"{condition['price']['most_identified']:.1%}")
        + "</tr>"
        for condition in priced
    ]
    caption = (
        "What the guarantee of a fixed neighbourhood allows between any two values of the rows, from one hypothesis: "
        "prices ε, and the largest rate at which anybody could pick one of 100 equally likely rows, e^ε/(e^ε + 99)."
    )
    head = ["ν", "T", "pure ε", f"ε at δ = {priced[0]['price']['delta']:g}", "identified at most"]
    return _table(caption, head, rows)


def _number(value: float | None) -> str:
    return "no bound" if value is None else f"{value:.4g}"


def _columns(results: Mapping[str, Any]) -> str:
    cells = [cell for cell in results["cells"] if cell["columns"]]
    if not cells:
        return ""
    count = len(cells[0]["columns"])
    rows = [
        f"<tr>{_cell(escape(cell['attack']))}{_cell(noise_of(cell))}{_cell(str(cell['rounds']))}"
        + "".join(_cell(f"{error:.3g}") for error in cell["columns"])
        + "</tr>"
        for cell in cells
    ]
    head = ["attack", "ν", "T", *(f"column {i + 1}" for i in range(count))]
    return _table("Median error of each input column, in its standard deviations.", head, rows)


def _layers(results: Mapping[str, Any]) -> str:
    """A row per layer, a column per condition."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for entry in results["layers"]:
        rows.setdefault(entry["layer"], []).append(entry)
    words = {"all": "all layers", "none": "no update, the prior alone"}
    body = [
        f"<tr>{_cell(escape(words.get(name, name)))}"
        + _cell(f"{entries[0]['parameters']:,}")
        + "".join(_cell(f"{entry['psnr']:.1f}") for entry in entries)
        + "</tr>"
        for name, entries in rows.items()
    ]
    first = next(iter(rows.values()))
    caption = (
        "PSNR in dB that a linearised attacker with a Gaussian prior is predicted to reach from one layer alone, and "
        f"from all of them (median of {first[0]['images']} images): no attack is made for it."
    )
    head = [f"ν = {noise_of(entry)}" + (f", T = {entry['rounds']}" if entry["rounds"] > 1 else "") for entry in first]
    return _table(caption, ["layer", "parameters", *head], body)


def _controls(results: Mapping[str, Any]) -> str:
    controls = results["controls"]
    if "class_mean" not in controls:
        if "mean_row" not in controls:
            return "<p>None.</p>"
        return (
            f"<p>The row of column means is off by {controls['mean_row']['error']:.3g} standard deviations (median); "
            f"one row in twenty is nearer to it than {controls['bar']:.3g}.</p>"
        )
    measures = ("psnr", "ssim", "correlation")
    rows = []
    for key, name in (("class_mean", "class-mean image"), ("black", "black image")):
        found = controls[key]
        medians = [_cell(f"{found[m][1]:.3g} <small>{found[m][0]:.3g} to {found[m][2]:.3g}</small>") for m in measures]
        rows.append(f"<tr>{_cell(name)}{''.join(medians)}</tr>")
    bar = f'<p class="note">Recognisable asks for a correlation of at least {controls["bar"]:.3f}.</p>'
    return (
        _table("Medians, with the 5th to the 95th percentile.", ["guess", "PSNR, dB", "SSIM", "correlation"], rows)
        + bar
    )


def _rate(rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        return _cell("–")
    text = f"{rate['hits']}/{rate['trials']} <small>{rate['low']:.0%}–{rate['high']:.0%}</small>"
    return _cell(text, hit=rate["hits"] > 0)


def _cell(text: str, *, hit: bool = False) -> str:
    return f'<td class="hit">{text}</td>' if hit else f"<td>{text}</td>"


def _table(caption: str, head: Iterable[str], rows: Iterable[str]) -> str:
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}'
        f"</caption><thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    return (
        f'<figure><img alt="{escape(picture.alt)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"
