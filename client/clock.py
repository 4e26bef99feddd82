"""How far the server's clock is from this one: freshness is judged by both."""

import contextlib
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any

import httpx


class ServerClock:
    """An interceptor of HTTP calls that notes how far the server's clock is ahead of this one."""

    def __init__(self) -> None:
        self.server_ahead = 0.0

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Pass the call on and read the answer's Date (whole seconds)."""
        response = call_next(context)
        with contextlib.suppress(KeyError, ValueError):
            date = parsedate_to_datetime(response.headers["date"]).timestamp()
            self.server_ahead = date + 0.5 - time.time()
        return response
