"""The experiments are programs beside the package: their folder goes where imports are looked for."""

import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

if not EXPERIMENTS.is_dir():
    pytest.skip("the experiments are in the source tree, and this is not one", allow_module_level=True)
sys.path.insert(0, str(EXPERIMENTS))
