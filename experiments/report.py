"""Write the measured parts of docs/experiments.md and docs/audit.md from the committed results.

    python experiments/report.py            # writes; run it after any experiment
    python experiments/report.py --check    # writes nothing; ends with 1 if the document is not up to date

How an experiment adds its section:

1. ``experiments/NAME.py`` runs the experiment and writes what it measured under ``experiments/results/NAME/``
   (``result.json`` by ``_results.write_result``, pictures by ``_results.write_figure``).
2. The same module has ``blocks(result) -> dict[str, str]``: Markdown by block name, from the content of ``result.json``
   and nothing else. Every figure that was measured stands in such a block.
3. ``docs/experiments.md``, or ``docs/audit.md`` for the results in ``_results.AUDIT``, has the prose, by hand, and
   where a block belongs a pair of lines ``<!-- NAME/BLOCK: begin -->`` and ``<!-- NAME/BLOCK: end -->``. This program
   fills in what is between them.

``tests/experiments/test_report.py`` fails when the document is not what the committed results say, when a block has no
place in the document, and when a result of an experiment has no section.
"""

import argparse
import importlib
import re
import sys

from _results import AUDIT, AUDIT_DOCUMENT, DOCUMENT, RESULTS, read_result

_BLOCK = re.compile(r"(<!-- (?P<name>\w+)/(?P<block>[\w-]+): begin -->\n).*?(<!-- (?P=name)/(?P=block): end -->)", re.S)


def render(text: str, *, of_audit: bool = False) -> str:
    """The document with every block filled in from the committed results; ``of_audit`` says which document it is.

    Raises ``ValueError`` for a marker that no experiment fills, and for a block or result without its marker.
    """
    written: dict[str, set[str]] = {}
    known: dict[str, dict[str, str]] = {}

    def filled(match: re.Match[str]) -> str:
        name, block = match["name"], match["block"]
        if name not in known:
            known[name] = blocks_of(name)
        if block not in known[name]:
            raise ValueError(f"Expected blocks {', '.join(known[name])} of {name} in the document, found {block!r}")
        written.setdefault(name, set()).add(block)
        return f"{match[1]}{known[name][block].strip()}\n{match[4]}"

    rendered = _BLOCK.sub(filled, text)
    for name in sorted(folder.parent.name for folder in RESULTS.glob("*/result.json")):
        if (name in AUDIT) != of_audit:
            continue
        if name not in known:
            raise ValueError(f"Expected a marker of results/{name} in the document, found none")
        if missing := sorted(known[name].keys() - written[name]):
            raise ValueError(f"Expected markers of {name}/{', '.join(missing)} in the document, found none")
    if unpaired := re.search(r"<!-- [\w/-]+: (?:begin|end) -->", _BLOCK.sub("", text)):
        raise ValueError(f"Expected markers in pairs, found {unpaired[0]} alone")
    return rendered


def blocks_of(name: str) -> dict[str, str]:
    """What an experiment's module says of its committed result."""
    blocks: dict[str, str] = importlib.import_module(name).blocks(read_result(name))
    return blocks


def main() -> None:
    """Write the document, or only check it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    for document, of_audit in ((DOCUMENT, False), (AUDIT_DOCUMENT, True)):
        text = document.read_text(encoding="utf-8")
        try:
            rendered = render(text, of_audit=of_audit)
        except ValueError as error:
            sys.exit(f"{document.name}: {error}")
        if check and rendered != text:
            sys.exit(f"Expected {document.name} to be what the results say, found another: run experiments/report.py")
        if not check:
            document.write_text(rendered, encoding="utf-8")


if __name__ == "__main__":
    main()
