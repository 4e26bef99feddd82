"""Prices as people read them: short, and never below the true one."""

import math
from decimal import ROUND_CEILING, Context, Decimal

_NOISE = Decimal(1) - Decimal("1e-12")  # what is this near to a short number, relative, is rounding of the computation


def rounded_up(value: float, digits: int = 4) -> str:
    """``value`` ≥ 0 in so many digits, rounded up: a shown price or ν must not be below the true one.

    "no bound" for infinity, and for NaN, which is no bound either.
    """
    if not math.isfinite(value):
        return "no bound"
    short = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(value) * _NOISE)
    return f"{float(short):.10g}"
