"""How fast ledgers are priced. Run by hand on a quiet machine: ``python benchmarks/accounting.py``.

Each line is the median of several runs of one thing, as a user's command or a client's ledger would do it. Limits to
hold: 10,000 rounds in 2 s, one more round on a live ledger in 50 ms (both for all four prices).
"""

import statistics
import time
from collections.abc import Callable

from coterie.mechanisms.accounting import Accountant
from coterie.mechanisms.calibration import noise_multipliers, planned_release
from coterie.mechanisms.events import UpdateRelease
from coterie.mechanisms.privacy_loss import L2LaplaceLoss

FEMNIST_LAYERS = (320, 18_496, 1_179_776, 7_998)
DELTA = 1e-5


def seconds(action: Callable[[], object], *, times: int = 7) -> float:
    """The median wall-clock time of ``action``."""
    spans = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans)


def priced(release: UpdateRelease, rounds: int) -> Accountant:
    """A ledger of ``rounds`` equal releases, added one by one and priced."""
    accountant = Accountant()
    for _ in range(rounds):
        accountant.add([release])
    accountant.price(delta=DELTA)
    return accountant


def one_more(accountant: Accountant, release: UpdateRelease) -> None:
    """What a client does after each round."""
    accountant.add([release])
    accountant.price(delta=DELTA)


def main() -> None:
    """Print one line per thing."""
    plans = {
        "n = 11, ν = 3": planned_release([11], 3.0),
        "n = 11, ν = 300": planned_release([11], 300.0),
        "FEMNIST, 4 layers, ν = 10,000": planned_release(FEMNIST_LAYERS, 10_000.0),
    }
    for name, release in plans.items():
        for rounds in (100, 10_000):
            live = priced(release, rounds)
            whole = seconds(lambda release=release, rounds=rounds: priced(release, rounds), times=3)
            more = seconds(lambda live=live, release=release: one_more(live, release))
            print(f"{name}: {rounds:6,} rounds {whole * 1e3:8.1f} ms, one more round {more * 1e3:6.1f} ms")
    unequal = [planned_release([11], 3 + index / 1000) for index in range(1000)]

    def price_unequal() -> None:
        accountant = Accountant()
        accountant.add(unequal)
        accountant.price(delta=DELTA)

    print(f"1,000 different releases, n = 11: {seconds(price_unequal, times=3) * 1e3:.1f} ms")
    for layers in ((11,), FEMNIST_LAYERS):
        span = seconds(
            lambda layers=layers: noise_multipliers(epsilon=1, delta=DELTA, rounds=100, layers=layers), times=3
        )
        print(f"ν for ε = 1, 100 rounds, {sum(layers):,} parameters: {span * 1e3:.1f} ms")
    exact = seconds(lambda: L2LaplaceLoss(1_206_590, 1_098.0).epsilon(DELTA))
    print(f"ε of one release, n = 1,206,590, exact: {exact * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
