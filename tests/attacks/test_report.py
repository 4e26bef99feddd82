"""The words of a verdict, and the page: what it says, and whether everybody can read it."""

import base64
from html.parser import HTMLParser
from typing import Any

import pytest

from coterie.attacks.metrics import rate
from coterie.attacks.pictures import Picture
from coterie.attacks.report import report_of
from coterie.attacks.verdict import LEVELS, Summary, chance_of, findings, is_found

CHANCES = {level: chance_of(level, classes_share=0.1, candidates=100, hypotheses=4) for level in LEVELS}


def summary(
    attack: str, nu: float, hits: int, *, trials: int = 20, rounds: int = 1, level: str = "recognisable"
) -> Summary:
    outcomes = [True] * hits + [False] * (20 - hits)
    rates = {level: rate(outcomes)}
    if level == "recognisable":
        rates |= {"full": rate(outcomes), "identified": rate(outcomes)}
    return Summary(attack, nu, rounds, None, rates, rate(outcomes), {"psnr": 20.0}, (), 0.1)


def test_an_attack_that_stops_is_said_to_have_been_stopped_with_the_intervals_upper_end() -> None:
    series = [summary("dlg", 0, 20), summary("dlg", 0.1, 20), *(summary("dlg", nu, 0) for nu in (1, 3, 10))]
    found = findings(series, CHANCES, noun="images")
    assert found.valid is True
    (line,) = found.stopped
    assert line.startswith("ν ≥ 1 stopped dlg in one round: tested at ν = 1, 3, 10 on 20 images, it made none of the")
    assert "at most 0 of 20, 95 % interval up to 16%" in line


def test_attacks_that_stop_alike_share_a_sentence() -> None:
    series = [summary(a, nu, 20 if nu < 1 else 0) for a in ("dlg", "idlg", "box") for nu in (0, 0.1, 1, 3)]
    (line,) = findings(series, CHANCES, noun="images").stopped
    assert line.startswith("ν ≥ 1 stopped dlg, idlg and box in one round")


def test_a_leak_at_more_noise_than_a_failure_moves_the_stop() -> None:
    series = [summary("box", 0, 20), summary("box", 1, 0), summary("box", 3, 1), summary("box", 10, 0)]
    found = findings(series, CHANCES, noun="images")
    assert found.stopped[0].startswith("ν = 10 stopped box")
    assert any(line.startswith("At ν = 3, in one round, box made images recognisable: 1 of 20") for line in found.found)


def test_nine_in_ten_without_noise_make_an_audit_valid() -> None:
    assert findings([summary("box", 0, 18), summary("box", 1, 0)], CHANCES, noun="images").valid is True
    invalid = findings([summary("box", 0, 17), summary("box", 1, 0)], CHANCES, noun="images")
    assert invalid.valid is False
    assert "got 17 of 20 images right where at least 90% are asked for" in invalid.validity


def test_one_attack_that_works_without_noise_is_enough_and_the_others_are_doubted() -> None:
    series = [summary("box", 0, 20), summary("box", 1, 0), summary("dlg", 0, 0), summary("dlg", 1, 0)]
    found = findings(series, CHANCES, noun="images")
    assert found.valid is True
    assert "Not so dlg: what these do not find says little." in found.validity
    assert [("dlg" in line, "fails as well" in line) for line in found.stopped] == [(False, False), (True, True)]


def test_a_guesser_does_not_make_an_audit_valid_where_reconstructions_were_tried() -> None:
    series = [summary("dlg", 0, 0), summary("label", 0, 20, level="label")]
    assert findings(series, CHANCES, noun="images").valid is False


def test_without_a_control_it_says_so() -> None:
    found = findings([summary("norm", 1, 3, level="identified")], CHANCES, noun="images")
    assert found.valid is None
    assert found.validity.startswith("No control")


def test_rounds_are_told_apart() -> None:
    series = [summary("box", 0, 20), summary("box", 1, 0), summary("box", 1, 20, rounds=100)]
    found = findings(series, CHANCES, noun="images")
    assert any("in 100 rounds of the same images at the same weights" in line for line in found.found)
    assert len(found.stopped) == 1


@pytest.mark.parametrize(("hits", "found"), [(0, False), (2, False), (3, True)])
def test_identification_is_found_where_chance_is_unlikely(hits: int, found: bool) -> None:
    """P(X ≥ 2) = 0.0169 and P(X ≥ 3) = 0.0010 for X ~ Binomial(20, 1/100)."""
    assert is_found("identified", rate([True] * hits + [False] * (20 - hits)), 0.01) is found


def test_one_image_is_a_leak_where_no_guess_reaches() -> None:
    assert is_found("full", rate([True] + [False] * 199), 0.0)


class Page(HTMLParser):
    """What the page holds, and whether its elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def results(**changes: Any) -> dict[str, Any]:
    share = {"hits": 1, "trials": 20, "low": 0.01, "high": 0.24}
    cell = {
        "attack": "box<b>", "noise_multiplier": 1.0, "rounds": 1, "local_epsilon": None, "rates": {"full": share},
        "converged": share, "medians": {"psnr": 20.0}, "columns": [], "cpu_seconds": 1.0,
    }  # fmt: skip
    quantiles = {"psnr": [1.0, 2.0, 3.0], "ssim": [0.1, 0.2, 0.3], "correlation": [0.1, 0.2, 0.3]}
    return {
        "settings": {
            "task": "digits", "images": 20, "batch_size": 1, "local_steps": 1, "neighbourhood": "relative",
            "granularity": "layer", "prior": None, "seed": 0,
        },
        "noun": "images", "model": {"name": "twin", "parameters": 650, "start": "default initialisation"},
        "notes": ["a <note>"], "candidates": 100, "chances": CHANCES,
        "controls": {"bar": 0.9, "class_mean": quantiles, "black": quantiles},
        "verdict": {"valid": True, "control_met": {}, "validity": "Control.", "found": ["A leak."], "stopped": []},
        "conditions": [{"noise_multiplier": 1.0, "rounds": 1, "local_epsilon": None, "price": None}],
        "cells": [cell], "rows": [], "layers": [], **changes,
    }  # fmt: skip


PICTURE = Picture("a.png", b"\x89PNG", "a line falls from 60 to 3", "A line")


def test_the_page_is_well_formed_self_contained_and_escaped() -> None:
    text = report_of(results(), [PICTURE])
    page = Page(text)
    assert not page.open
    assert "a <note>" in "".join(page.text)
    assert "box<b>" in "".join(page.text)
    sources = [attributes["src"] for tag, attributes in page.elements if "src" in attributes]
    assert sources == ["data:image/png;base64," + base64.b64encode(PICTURE.png).decode()]
    assert not {"link", "script", "iframe"} & {tag for tag, _ in page.elements}
    assert "url(" not in text
    assert "@import" not in text


def test_the_page_can_be_read_by_everybody() -> None:
    page = Page(report_of(results(), [PICTURE]))
    tags = [tag for tag, _ in page.elements]
    assert dict(page.elements)["html"] == {"lang": "en"}
    assert [attributes["alt"] for tag, attributes in page.elements if tag == "img"] == [PICTURE.alt]
    assert tags.count("h1") == 1
    assert tags.count("main") == 1
    assert tags.count("caption") == tags.count("table")
    assert all(attributes.get("scope") == "col" for tag, attributes in page.elements if tag == "th")
    assert any(attributes.get("name") == "viewport" for tag, attributes in page.elements if tag == "meta")


def _luminance(colour: str) -> float:
    """WCAG 2's relative luminance of ``#rrggbb``."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_wcag_contrast_in_light_and_dark(scheme: int) -> None:
    from coterie.attacks.report import _STYLE

    block = _STYLE.split(":root {")[1 + scheme].split("}")[0]
    colours = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in block.split(";")) if value}
    for ink in ("--ink", "--soft", "--bad", "--good", "--doubt"):
        for paper in ("--paper", "--box"):
            light, dark = sorted((_luminance(colours[ink]), _luminance(colours[paper])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, paper)


def test_an_invalid_audit_is_headed_so() -> None:
    verdict = {"valid": False, "control_met": {}, "validity": "This audit is invalid.", "found": [], "stopped": []}
    text = report_of(results(verdict=verdict), [])
    assert "<strong>Invalid.</strong>" in text
    assert "It cannot show that there is no better one." in text


def test_a_guarantees_price_is_shown_with_what_it_allows() -> None:
    price = {"local_pure": 1.0, "local_tight": 0.12, "delta": 1e-5, "most_identified": 0.0267}
    condition = {"noise_multiplier": 1300.0, "rounds": 1, "local_epsilon": 1.0, "price": price}
    text = "".join(Page(report_of(results(conditions=[condition]), [])).text)
    assert "2.7%" in text
    assert "1300 (local ε 1)" in text
