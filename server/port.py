"""The public port: an HTTP server in a thread whose every answer comes from one function.

Free of Flower. It adds one thing to plain HTTP: an answer may say that there is nothing to tell *yet*, and the request
is then held until ``Port.ring`` names it or some seconds have passed. Flower's own server answers "nothing" at once,
so that a client must ask several times a second to learn of its work in time: 100 idle clients keep a core busy.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from coterie.address import Address
from coterie.errors import CoterieError

HOLD_SECONDS = 15.0  # below the 30 s after which Flower's client gives a request up
LARGEST_REQUEST_BYTES = 64 * 2**20  # Flower cuts arrays into pieces of 5 MiB

RawHeaders = Sequence[tuple[bytes, bytes]]
Event = MutableMapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """An HTTP answer. With ``wait_for``, it is only sent when nobody rings by that name in time."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/octet-stream"
    wait_for: bytes | None = None


NOT_FOUND = Answer(404)
Respond = Callable[[str, RawHeaders, bytes], Answer]


def bind(address: Address) -> socket.socket:
    """A listening socket. Raises ``CoterieError`` when the port is in use or the host is not of this machine."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise CoterieError(
            f"Expected --listen with a host name or address of this machine, found {address.host!r}: "
            "use 127.0.0.1, or 0.0.0.0 for every network"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise CoterieError(
                f"Expected port {address.port} free on {address.host}, found it in use: choose another with --listen"
            ) from error
        raise CoterieError(
            f"Expected to be able to listen on {address}, found: {error.strerror}: choose another with --listen"
        ) from error
    return listener


class Port:
    """ASGI application: ``POST`` to ``respond``, ``/health``, and nothing else."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bells: dict[bytes, set[asyncio.Event]] = {}  # touched in the loop's thread only
        self._closed = False

    def ring(self, names: Iterable[bytes]) -> None:
        """Ask ``respond`` again for the requests held under these names. Callable from any thread."""
        self._call(self._wake, list(names))

    def close(self) -> None:
        """Hold no request any longer. Callable from any thread."""
        self._closed = True
        self._call(lambda: self._wake(list(self._bells)))

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None:  # None: nobody has asked yet
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(function, *arguments)

    def _wake(self, names: Sequence[bytes]) -> None:
        for name in names:
            for bell in self._bells.get(name, ()):
                bell.set()

    async def __call__(self, scope: Event, receive: Callable[[], Any], send: Callable[[Event], Any]) -> None:
        """Serve one request. uvicorn calls this."""
        if scope["type"] != "http":
            return
        self._loop = asyncio.get_running_loop()
        body = await _read(receive)
        if body is None:
            return
        path, method = scope["path"], scope["method"]
        if path == "/health" and method in ("GET", "HEAD"):
            answer: Answer | None = Answer(200)
        elif method != "POST":
            answer = NOT_FOUND
        elif len(body) > LARGEST_REQUEST_BYTES:
            answer = Answer(413)
        else:
            answer = await self._patient(lambda: self._respond(path, scope["headers"], body), receive)
        if answer is not None:
            headers = [(b"content-type", answer.content_type), (b"content-length", b"%d" % len(answer.body))]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": answer.body if method != "HEAD" else b""})

    async def _patient(self, respond: Callable[[], Answer], receive: Callable[[], Any]) -> Answer | None:
        """The answer, asked for again while there is nothing to tell; None when the client has left."""
        answer = respond()
        if answer.wait_for is None:
            return answer
        name, bell = answer.wait_for, asyncio.Event()
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(receive))
        self._bells.setdefault(name, set()).add(bell)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + HOLD_SECONDS
        try:
            while answer.wait_for is not None and loop.time() < deadline and not self._closed:
                ringing: asyncio.Future[Any] = asyncio.ensure_future(bell.wait())
                await asyncio.wait({ringing, gone}, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
                ringing.cancel()
                if gone.done():
                    return None
                bell.clear()
                answer = respond()
        finally:
            gone.cancel()
            self._bells[name].discard(bell)
            if not self._bells[name]:
                del self._bells[name]
        return answer


async def _read(receive: Callable[[], Any]) -> bytes | None:
    """The request's body, cut soon after the largest that is allowed; None when the client left while it sent."""
    body = bytearray()
    while (part := await receive())["type"] == "http.request":
        if len(body) <= LARGEST_REQUEST_BYTES:
            body += part.get("body", b"")
        if not part.get("more_body", False):
            return bytes(body)
    return None


async def _disconnected(receive: Callable[[], Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def serving(port: Port, listener: socket.socket) -> Iterator[None]:
    """Serve ``port`` on ``listener`` in a thread while the context is open; it ends within a few seconds."""
    _allow_many_connections()
    # Requests that clients break off, and those still open at the end, are no news.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    server = uvicorn.Server(
        uvicorn.Config(
            port,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="port", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the HTTP server did not start")
            time.sleep(0.01)
        yield
    finally:
        port.close()
        server.should_exit = True
        thread.join(10)


def _allow_many_connections() -> None:
    """A client holds up to two connections, and the usual soft limit is 1024 open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
