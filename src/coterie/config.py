"""The settings of a run and of a data holder: one validated object each, from a TOML file and flags."""

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood

INTERRUPTED = "interrupted"  # why a run stopped: Ctrl-C or SIGTERM

# Strict: a file's `true` is no number.
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True)]


class Assignment(StrEnum):
    """Who says which hypothesis an update belongs to: the client sends the index, or the server guesses it."""

    CLIENT = "client"
    SERVER = "server"


class Weighting(StrEnum):
    """What an update weighs in its hypothesis's average: the same for each, or its client's row count."""

    EQUAL = "equal"
    SAMPLES = "samples"


class Reseed(StrEnum):
    """Whether a hypothesis that nobody chooses gets a second chance; off is the published algorithm."""

    ON = "on"
    OFF = "off"


class Start(StrEnum):
    """Where the k hypotheses start: at independent draws, all at one draw, or at draws that lie far apart."""

    INDEPENDENT = "independent"
    SHARED = "shared"
    SPREAD = "spread"


class Granularity(StrEnum):
    """What is clipped and noised as one vector: each layer, or the whole update."""

    LAYER = "layer"
    WHOLE = "whole"


class Selection(StrEnum):
    """How a client takes its hypothesis: plainly the best, or by a private choice."""

    ARGMIN = "argmin"
    RANDOMIZED = "randomized"
    EXPONENTIAL = "exponential"


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSettings(_Settings):
    """What ``flower-server`` runs. Privacy fields are proposals: each client accepts or refuses them."""

    listen: str = "127.0.0.1:9092"
    task: str
    hypotheses: Annotated[int, Field(ge=1, le=1000, strict=True)] = 3
    rounds: PositiveInt = 20
    clients_per_round: PositiveInt = 10
    min_clients: PositiveInt = 2
    round_timeout: PositiveFloat = 120.0
    assignment: Assignment = Assignment.CLIENT
    weighting: Weighting = Weighting.EQUAL
    start: Start = Start.INDEPENDENT
    reseed: Reseed = Reseed.ON
    reseed_after: PositiveInt = 5
    out: Path = Path("runs/latest")
    validation_fraction: Fraction = 0.2
    validate_every: PositiveInt = 5
    patience: Count = 0
    seed: Annotated[int, Field(strict=True)] = 0
    epochs: PositiveInt | None = None
    step_size: PositiveFloat | None = None
    batch_size: PositiveInt | None = None
    noise_multiplier: PositiveFloat | None = None
    neighbourhood: Neighbourhood | None = None
    clipping_norm: PositiveFloat | None = None

    @model_validator(mode="after")
    def _index_is_needed(self) -> Self:
        if self.assignment is Assignment.SERVER and self.weighting is Weighting.SAMPLES:
            raise ValueError("Expected weighting = equal with assignment = server, found samples")
        return self


class ClientSettings(_Settings):
    """What one ``flower-client`` holds to. The server cannot lower any of it."""

    server: str = "127.0.0.1:9092"
    task: str
    data: Path | None = None
    state: Path
    partition_by: str | None = None
    fleet: PositiveInt | None = None
    strict: bool = False
    noise_multiplier: PositiveFloat
    budget: PositiveFloat
    delta: Annotated[float, Field(gt=0, lt=1, strict=True)] = 1e-5
    neighbourhood: Neighbourhood = Neighbourhood.FIXED
    granularity: Granularity = Granularity.LAYER
    clipping_norm: PositiveFloat | None = None
    relative_floor: PositiveFloat = 1e-3
    selection: Selection = Selection.ARGMIN
    selection_epsilon: PositiveFloat | None = None
    selection_loss_bound: PositiveFloat | None = None
    validation: bool = True
    share_sample_count: bool = False
    fine_tune: Count = 0
    retry_for: PositiveFloat = 600.0

    @model_validator(mode="after")
    def _selection_is_complete(self) -> Self:
        private = self.selection is not Selection.ARGMIN
        if private != (self.selection_epsilon is not None):
            raise ValueError(
                f"Expected selection_epsilon {'set' if private else 'absent'} with selection = "
                f"{self.selection}, found {self.selection_epsilon}"
            )
        if (self.selection is Selection.EXPONENTIAL) != (self.selection_loss_bound is not None):
            raise ValueError(
                f"Expected selection_loss_bound only and always with selection = exponential, "
                f"found {self.selection_loss_bound} with {self.selection}"
            )
        return self


AnySettings = TypeVar("AnySettings", RunSettings, ClientSettings)


def load_settings(kind: type[AnySettings], file: Path | None, flags: Mapping[str, Any]) -> AnySettings:
    """Settings from ``file`` (TOML, optional), each overridden by the flag of the same name that is not None.

    Raises ``CoterieError`` for an unknown key (naming the nearest known one), a missing one, or a bad value.
    """
    values = {**_read_toml(file), **{name: value for name, value in flags.items() if value is not None}}
    for key in values:
        if key not in kind.model_fields:
            near = get_close_matches(key, kind.model_fields, n=1, cutoff=0.0)
            raise CoterieError(f"Expected a known setting, found {key!r}: did you mean {near[0]!r}?")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "missing":
            key = str(first["loc"][0])
            flag = key.replace("_", "-")
            raise CoterieError(f"Expected --{flag} (or {key} in the file), found neither") from error
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise CoterieError(message) from error
        name, found = ".".join(map(str, first["loc"])), first["input"]
        raise CoterieError(f"Expected another value of {name}: {message}, found {found!r}") from error


def _read_toml(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CoterieError(f"Expected a readable settings file at {file}, found: {error}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CoterieError(f"Expected TOML in {file}, found: {error}") from error
    return {key.replace("-", "_"): value for key, value in values.items()}
