"""docs/audit.md says what the committed results say, and what it says of facts follows from the figures."""

from typing import Any

import audit
import pytest
import report
from _results import AUDIT_DOCUMENT


def test_the_committed_document_is_up_to_date() -> None:
    text = AUDIT_DOCUMENT.read_text(encoding="utf-8")
    assert report.render(text, of_audit=True) == text


def _rate(hits: int, trials: int) -> dict[str, Any]:
    return {"hits": hits, "trials": trials, "low": hits / trials / 2, "high": 1.0}


def _part(epsilon: float, hits: int) -> dict[str, Any]:
    cell = {"attack": "candidates", "noise_multiplier": 9.0, "rounds": 1, "local_epsilon": epsilon, "medians": {}}
    return {
        "cells": [{**cell, "rates": {"identified": _rate(hits, 200)}}],
        "conditions": [{"local_epsilon": epsilon, "price": {"most_identified": 0.0267}}],
    }


@pytest.mark.parametrize(("hits", "holds"), [(2, "yes"), (10, "yes"), (11, "**no**")])
def test_an_interval_above_what_the_guarantee_allows_is_said_to_break_it(hits: int, holds: str) -> None:
    """Half of 11 of 200, the made-up interval's lower end, is 2.75 %, above 2.67 %."""
    (row,) = audit._budget_facts({"budgets": _part(1.0, hits)})
    assert row[1] == "at most 2.7%"
    assert row[3] == holds


def test_a_share_below_what_was_to_be_shown_is_said_to_fail() -> None:
    assert audit._row("x", _rate(17, 20), at_least=0.9)[3] == "**no**"
    assert audit._row("x", _rate(18, 20), at_least=0.9)[3] == "yes"
    assert audit._row("x", _rate(1, 20), at_most=0.0)[3] == "**no**"


def test_every_part_has_its_block() -> None:
    blocks = audit.blocks({"parts": {}})
    assert "*Not run yet.*" in blocks["cnn"]
    assert set(blocks) == {"facts", "layers", *audit.parts(AUDIT_DOCUMENT)}
