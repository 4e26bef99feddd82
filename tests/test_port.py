"""The public port by itself: requests that are held, and everything that is not one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from coterie.address import Address
from coterie.server import port as module
from coterie.server.port import Answer, Port, RawHeaders, bind, serving

PATIENCE = 60.0


class Mailbox:
    """Answers nothing until there is something; counts how often it was asked."""

    def __init__(self) -> None:
        self.content = b""
        self.asked = 0

    def respond(self, path: str, headers: RawHeaders, body: bytes) -> Answer:
        self.asked += 1
        if path == "/broken":
            raise ZeroDivisionError
        if path != "/mail":
            return Answer(404)
        return Answer(200, self.content, wait_for=None if self.content else body)


@contextmanager
def running(mailbox: Mailbox) -> Iterator[tuple[Port, httpx.Client]]:
    port = Port(mailbox.respond)
    with bind(Address("127.0.0.1", 0)) as listener:
        url = "http://{}:{}".format(*listener.getsockname())
        with httpx.Client(base_url=url, timeout=PATIENCE) as http, serving(port, listener):
            yield port, http


def until(condition: object, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_held_request_is_answered_when_its_name_is_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD_SECONDS", 10 * PATIENCE)  # only a ring can answer in time
    mailbox = Mailbox()
    answers: list[bytes] = []
    with running(mailbox) as (port, http):
        waiter = threading.Thread(target=lambda: answers.append(http.post("/mail", content=b"me").content))
        waiter.start()
        until(lambda: mailbox.asked == 1, "the request to arrive")
        port.ring([b"someone else"])
        port.ring([b"me"])  # nothing has come: the request is held on
        until(lambda: mailbox.asked == 2, "the ring to be heard")
        assert not answers
        mailbox.content = b"work"
        port.ring([b"me"])
        waiter.join(PATIENCE)
        assert answers == [b"work"]
        assert mailbox.asked == 3
        assert not port._bells


def test_a_held_request_is_answered_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD_SECONDS", 0.5)
    mailbox = Mailbox()
    with running(mailbox) as (port, http):
        answer = http.post("/mail", content=b"me")
        assert (answer.status_code, answer.content, mailbox.asked) == (200, b"", 2)
        assert not port._bells


def test_a_client_that_has_left_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed out after the client has gone would be lost."""
    monkeypatch.setattr(module, "HOLD_SECONDS", 10 * PATIENCE)
    mailbox = Mailbox()
    with running(mailbox) as (port, http):
        with pytest.raises(httpx.ReadTimeout):
            http.post("/mail", content=b"me", timeout=0.5)
        until(lambda: not port._bells, "the client's leaving to be noticed")
        mailbox.content = b"work"
        port.ring([b"me"])
        assert http.post("/other").status_code == 404  # the loop has passed by since
        assert mailbox.asked == 2  # once for /mail, once for /other


def test_closing_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD_SECONDS", 10 * PATIENCE)
    mailbox = Mailbox()
    statuses: list[int] = []
    with running(mailbox) as (_, http):
        waiter = threading.Thread(target=lambda: statuses.append(http.post("/mail", content=b"me").status_code))
        waiter.start()
        until(lambda: mailbox.asked == 1, "the request to arrive")
    waiter.join(PATIENCE)
    assert statuses == [200]


def test_what_is_no_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_REQUEST_BYTES", 1000)
    mailbox = Mailbox()
    with running(mailbox) as (_, http):
        assert http.get("/health").status_code == 200
        assert http.head("/health").status_code == 200
        assert http.post("/health").status_code == 404
        assert http.get("/mail").status_code == 404
        assert mailbox.asked == 1  # POST /health
        assert http.post("/mail", content=b"x" * 1001).status_code == 413
        assert mailbox.asked == 1
        assert http.post("/broken").status_code == 500
        mailbox.content = b"still here"
        assert http.post("/mail", content=b"x" * 1000).content == b"still here"
