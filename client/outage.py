"""How a client bears with a server that is away: when it tries again, when it says so, and when it gives up."""

import random
import time
from collections.abc import Callable

from coterie.errors import CoterieError

SHORTEST_DELAY_SECONDS = 0.2
LONGEST_DELAY_SECONDS = 10.0
REMINDER_SECONDS = 60.0


class Outage:
    """One stretch of time without a connection to ``server``. It begins when it is made."""

    def __init__(self, server: str, *, retry_for: float, log: Callable[[str], None]) -> None:
        self._server = server
        self._retry_for = retry_for
        self._log = log
        self._began = time.monotonic()
        self._delay = SHORTEST_DELAY_SECONDS
        self._announce_at = self._began

    def wait(self, reason: str) -> None:
        """Sleep until the next try is due.

        Delays double from 0.2 s to 10 s, each shortened by up to a half at random, so that many clients do not
        come back at once. The reason is logged at first and then once a minute. Raises ``CoterieError`` once
        ``retry_for`` seconds are over.
        """
        now = time.monotonic()
        left = self._began + self._retry_for - now
        if left <= 0:
            raise CoterieError(
                f"Expected a server at {self._server}, found none for {now - self._began:.0f} s ({reason}): "
                "check that flower-server runs there, and --server"
            )
        if now >= self._announce_at:
            self._announce_at = now + REMINDER_SECONDS
            self._log(f"waiting for {self._server}: {reason}; giving up in {left:.0f} s")
        time.sleep(min(self._delay * random.uniform(0.5, 1.0), left))
        self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)

    def over(self) -> None:
        """Say that the server is back."""
        self._log(f"connected to {self._server}")
