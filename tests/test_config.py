"""Settings: a flag goes before the file, and every mistake is one line that names what to change."""

import math
from pathlib import Path

import pytest

from coterie.config import (
    Assignment,
    ClientSettings,
    Granularity,
    RunSettings,
    Selection,
    Weighting,
    load_settings,
)
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood

CLIENT = {"task": "hospital", "state": "s", "noise_multiplier": 3.0, "budget": 10.0}


def in_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def error_of(kind: type, file: Path | None, flags: dict[str, object]) -> str:
    with pytest.raises(CoterieError) as caught:
        load_settings(kind, file, flags)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("Expected")
    return text


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    file = in_file(tmp_path, 'task = "hospital"\nrounds = 7\nclients-per-round = 5\n')
    settings = load_settings(RunSettings, file, {"rounds": 9, "seed": 0, "hypotheses": None})
    assert (settings.rounds, settings.clients_per_round, settings.hypotheses) == (9, 5, 3)
    assert settings.task == "hospital"


def test_a_flag_of_false_or_zero_is_a_flag(tmp_path: Path) -> None:
    file = in_file(tmp_path, "validation = true\nfine_tune = 3\nstrict = true\n")
    settings = load_settings(ClientSettings, file, {**CLIENT, "validation": False, "fine_tune": 0, "strict": None})
    assert (settings.validation, settings.fine_tune, settings.strict) == (False, 0, True)


def test_a_client_is_careful_by_default() -> None:
    settings = load_settings(ClientSettings, None, CLIENT)
    assert settings.neighbourhood is Neighbourhood.FIXED
    assert settings.granularity is Granularity.LAYER
    assert settings.selection is Selection.ARGMIN
    assert settings.share_sample_count is False
    assert settings.clipping_norm is None  # the task's


@pytest.mark.parametrize("missing", ["noise_multiplier", "budget", "state", "task"])
def test_privacy_settings_have_no_default(missing: str) -> None:
    values = {name: value for name, value in CLIENT.items() if name != missing}
    text = error_of(ClientSettings, None, values)
    assert f"--{missing.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("noise-multiplyer", "noise_multiplier"), ("budgets", "budget"), ("clip_norm", "clipping_norm"), ("q", "")],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, key: str, nearest: str) -> None:
    text = error_of(ClientSettings, in_file(tmp_path, f"{key} = 1\n"), CLIENT)
    assert key.replace("-", "_") in text
    assert f"did you mean '{nearest}" in text


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (RunSettings, "hypotheses", 0),
        (RunSettings, "rounds", -1),
        (RunSettings, "rounds", 2.5),
        (RunSettings, "rounds", "many"),
        (RunSettings, "clients_per_round", 0),
        (RunSettings, "min_clients", 0),
        (RunSettings, "patience", -1),
        (RunSettings, "validate_every", 0),
        (RunSettings, "round_timeout", 0.0),
        (RunSettings, "round_timeout", math.inf),
        (RunSettings, "validation_fraction", 1.0),
        (RunSettings, "validation_fraction", -0.1),
        (RunSettings, "validation_fraction", math.nan),
        (RunSettings, "assignment", "sever"),
        (RunSettings, "reseed", "maybe"),
        (RunSettings, "reseed_after", 0),
        (RunSettings, "reseed_after", 2.5),
        (RunSettings, "start", "random"),
        (RunSettings, "noise_multiplier", 0.0),
        (RunSettings, "clipping_norm", math.nan),
        (ClientSettings, "noise_multiplier", 0.0),
        (ClientSettings, "noise_multiplier", -3.0),
        (ClientSettings, "noise_multiplier", math.inf),
        (ClientSettings, "noise_multiplier", math.nan),
        (ClientSettings, "noise_multiplier", True),
        (ClientSettings, "budget", 0.0),
        (ClientSettings, "budget", math.inf),
        (ClientSettings, "budget", math.nan),
        (ClientSettings, "budget", True),
        (ClientSettings, "delta", 0.0),
        (ClientSettings, "delta", 1.0),
        (ClientSettings, "delta", math.nan),
        (ClientSettings, "neighbourhood", "fix"),
        (ClientSettings, "clipping_norm", -1.0),
        (ClientSettings, "relative_floor", 0.0),
        (ClientSettings, "fleet", 0),
        (ClientSettings, "fine_tune", -1),
        (ClientSettings, "retry_for", math.nan),
        (ClientSettings, "data", 3),
    ],
)
def test_a_bad_value_is_named_with_what_was_found(kind: type, name: str, value: object) -> None:
    text = error_of(kind, None, {**(CLIENT if kind is ClientSettings else {"task": "t"}), name: value})
    assert name in text
    assert repr(value) in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"selection": "randomized"}, "selection_epsilon set"),
        ({"selection_epsilon": 1.0}, "selection_epsilon absent"),
        ({"selection": "exponential", "selection_epsilon": 1.0}, "selection_loss_bound"),
        ({"selection": "randomized", "selection_epsilon": 1.0, "selection_loss_bound": 2.0}, "selection_loss_bound"),
        ({"selection_loss_bound": 2.0}, "selection_loss_bound"),
    ],
)
def test_selection_settings_go_together(changes: dict[str, object], named: str) -> None:
    assert named in error_of(ClientSettings, None, {**CLIENT, **changes})


def test_complete_selections_are_taken() -> None:
    randomized = load_settings(ClientSettings, None, {**CLIENT, "selection": "randomized", "selection_epsilon": 0.5})
    assert (randomized.selection, randomized.selection_epsilon) == (Selection.RANDOMIZED, 0.5)
    full = {"selection": "exponential", "selection_epsilon": 0.5, "selection_loss_bound": 2.0}
    assert load_settings(ClientSettings, None, {**CLIENT, **full}).selection is Selection.EXPONENTIAL


def test_row_counts_are_no_weights_where_the_server_assigns() -> None:
    both = {"task": "t", "assignment": Assignment.SERVER, "weighting": Weighting.SAMPLES}
    assert "weighting = equal with assignment = server" in error_of(RunSettings, None, both)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"rounds = = 3\n", "Expected TOML"),
        (b"task: hospital\n", "Expected TOML"),
        (b"\xff\xfe\x00", "readable settings file"),
        (b"[client]\nbudget = 3\n", "'client'"),
    ],
)
def test_a_file_that_is_no_settings_file_is_named(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    assert named in error_of(RunSettings, path, {"task": "t"})


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.toml") in error_of(RunSettings, tmp_path / "none.toml", {})
    assert str(tmp_path) in error_of(RunSettings, tmp_path, {})


def test_settings_cannot_be_changed_later() -> None:
    settings = load_settings(ClientSettings, None, CLIENT)
    with pytest.raises(ValueError, match="frozen"):
        settings.budget = 1e9
