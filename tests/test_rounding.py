"""A shown price is never below the true one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.rounding import rounded_up


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (11 / 3, "3.667"),
        (1.9307, "1.931"),
        (1.93000001, "1.931"),
        (0.4, "0.4"),
        (3 * 0.1, "0.3"),  # 0.30000000000000004: the computation's rounding, not a price
        (130.0, "130"),
        (123456.0, "123500"),
        (0.0, "0"),
        (1e-300, "1e-300"),
        (1.7e308, "1.7e+308"),
        (math.inf, "no bound"),
        (math.nan, "no bound"),
    ],
)
def test_examples(value: float, text: str) -> None:
    assert rounded_up(value) == text


@given(st.floats(1e-300, 1e300), st.integers(2, 8))
def test_it_is_not_below_and_close(value: float, digits: int) -> None:
    shown = float(rounded_up(value, digits))
    assert value * (1 - 2e-12) <= shown <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-12)
