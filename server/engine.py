"""The embedded SuperLink: Flower's server inside this process.

The only server file that reads Flower's private names (flwr 1.42). Stock Flower serves three APIs on the port that
clients use; two of them, Control and Runtime, let a peer submit code and claim the run. Here they do not exist: the
port serves the Fleet API, which clients use, and ``/health``, and this process talks to the link state directly.
"""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import resource
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

# Read by Flower when it is imported: nothing about a run is reported to anyone.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

import uvicorn
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)
from fastapi import FastAPI
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, SubStatus
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.serverapp import Grid
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLWR_IN_MEMORY_DB_NAME,
    NOOP_FEDERATION_ID,
    TaskType,
)
from flwr.supercore.date import now
from flwr.supercore.error import http_error_translator
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.logger import FLOWER_LOGGER
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStoreFactory
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.supercore.routers import health
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router as fleet_router
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from coterie.errors import CoterieError

PULL_PATH = "/v1/fleet/pull-messages"
HOLD_SECONDS = 15.0  # below the 30 s after which Flower's client gives a request up
REPLY_INTERVAL_SECONDS = 0.05


@dataclass(frozen=True)
class Address:
    """Where the server listens. Port 0 takes any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """``host:port`` or ``[IPv6]:port``. Raises ``CoterieError`` for anything else."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
            raise CoterieError(f"Expected an address such as 127.0.0.1:9092, found {text!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EmbeddedGrid(Grid):
    """Flower's ``Grid`` over the link state of this process: no HTTP between the strategy and the SuperLink."""

    def __init__(self, state: InMemoryLinkState, run: Run, address: Address, long_poll: "_LongPoll") -> None:
        self.address = address
        self._state = state
        self._run = run
        self._long_poll = long_poll
        self._sent: dict[str, Metadata] = {}
        self._uploading: dict[str, tuple[Message, ObjectTree]] = {}

    @property
    def run(self) -> Run:
        """The one run of this process."""
        return replace(self._run)

    def set_run(self, run: Run) -> None:
        """Not supported: the embedded SuperLink has one run."""
        raise NotImplementedError("the embedded SuperLink has one run")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Flower's deprecated spelling of the ``Message`` constructor."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """The ids of the nodes that are online, ascending. They are uint64: never let numpy convert them."""
        return sorted(self._state.get_nodes(self._run.run_id))

    def get_nodes(self) -> Sequence[NodeInfo]:
        """What Flower knows about the nodes that are online."""
        return list(self._state.get_node_info(node_ids=self.get_node_ids()))

    def identities(self) -> dict[int, str]:
        """Online node ids to fingerprints of their public keys.

        A fingerprint is the hexadecimal SHA-256 of the key's DER SubjectPublicKeyInfo, the same as
        ``coterie.client.keys.fingerprint``. Node ids are new in every run; a fingerprint stays with the key.
        """
        return {node.node_id: _fingerprint(node.public_key) for node in self.get_nodes()}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Hand messages to the SuperLink. Returns their ids in order, ``""`` where the node does not exist."""
        batch = list(messages)
        run_id = self._run.run_id
        objects: dict[str, InflatableObject] = {}
        with no_object_id_recompute():
            for message in batch:
                message.metadata.__dict__["_message_id"] = message.object_id
                objects.update(get_all_nested_objects(message))
            # Objects first, the message last: a client never sees a message whose objects are not there yet.
            for message in batch:
                session = self._state.start_session(run_id)
                missing = self._state.preregister_object_tree(get_object_tree(message), session)
                for object_id in missing:
                    self._state.store_object(run_id, session, object_id, objects[object_id].deflate())
        ids = [self._store(message) for message in batch]
        self._long_poll.ring(
            node.public_key for node in self._state.get_node_info(node_ids=[m.metadata.dst_node_id for m in batch])
        )
        return ids

    def _store(self, message: Message) -> str:
        header = message_from_proto(message_to_proto(remove_content_from_message(message)))
        message_id = self._state.store_message_ins(header) or ""
        if message_id:
            self._sent[message_id] = message.metadata
        else:
            self._state.object_store.delete(message.metadata.message_id)
        return message_id

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to ``message_ids`` that are complete by now; each is returned once.

        A reply's metadata are those that the SuperLink checked, not those inside the reply: a client cannot speak
        for another. When a node went offline or a reply cannot be read, a reply with an error takes its place,
        whose ``src_node_id`` is the node that was asked.
        """
        asked = set(message_ids)
        self._collect_headers(asked - self._uploading.keys())
        online = self._state.get_nodes(self._run.run_id)
        replies = []
        for message_id in asked & self._uploading.keys():
            header, tree = self._uploading[message_id]
            reply = self._assemble(header, tree)
            if reply is None and header.metadata.src_node_id in online:
                continue  # the client is still sending
            if reply is None:
                reply = self._error(message_id, ErrorCode.NODE_UNAVAILABLE, "the client left while it replied")
            replies.append(reply)
            self._forget({message_id})
        return replies

    def _collect_headers(self, message_ids: set[str]) -> None:
        state = self._state
        with state.lock:
            # Flower's own look-up answers for a client that has left before it looks for that client's reply, so
            # that who replies and leaves at once would be lost.
            replied = state.message_ins_id_to_message_res_id
            headers = [state.message_res_store[replied[m]] for m in message_ids & replied.keys()]
            silent = message_ids - replied.keys()
        headers += state.get_message_res(message_ids=silent, run_id=self._run.run_id)
        for header in headers:
            try:
                tree = state.object_store.get_object_tree(header.metadata.message_id)
            except NoObjectInStoreError:  # expired while it was being sent
                tree = ObjectTree(object_id=header.metadata.message_id)
            self._uploading[header.metadata.reply_to_message_id] = (header, tree)

    def _assemble(self, header: Message, tree: ObjectTree) -> Message | None:
        """The reply, or None while objects of it are still on their way."""
        message_id = header.metadata.reply_to_message_id
        if header.metadata.src_node_id == SUPERLINK_NODE_ID:
            return self._error(message_id, header.error.code, header.error.reason or "")
        contents: dict[str, bytes] = {}
        for node in iterate_object_tree(tree):
            content = self._state.get_object(self._run.run_id, node.object_id)
            if content is None:
                return self._error(message_id, ErrorCode.MESSAGE_UNAVAILABLE, "the reply was never completed")
            if not content:
                return None
            contents[node.object_id] = content
        try:
            inner = inflate_object_from_contents(tree.object_id, contents)
            if not isinstance(inner, Message):
                raise TypeError(type(inner).__name__)
            return make_message(
                metadata=header.metadata,
                content=inner.content if inner.has_content() else None,
                error=inner.error if inner.has_error() else None,
            )
        except Exception as error:  # whatever a peer sends, it must not end the run
            reason = f"the reply cannot be read ({type(error).__name__})"
            return self._error(message_id, ErrorCode.UNKNOWN, reason)

    def _error(self, message_id: str, code: int, reason: str) -> Message:
        asked = self._sent[message_id]
        metadata = Metadata(
            run_id=asked.run_id,
            message_id="",
            src_node_id=asked.dst_node_id,
            dst_node_id=asked.src_node_id,
            reply_to_message_id=message_id,
            group_id=asked.group_id,
            created_at=now().timestamp(),
            ttl=asked.ttl,
            message_type=asked.message_type,
        )
        return make_message(metadata=metadata, error=Error(code, reason))

    def _forget(self, message_ids: set[str]) -> None:
        """Withdraw messages with their replies: a client that asks later does not get them."""
        self._state.delete_messages(message_ids)
        for message_id in message_ids:
            self._sent.pop(message_id, None)
            self._state.object_store.delete(message_id)
            if (uploading := self._uploading.pop(message_id, None)) is not None:
                self._state.object_store.delete(uploading[1].object_id)

    def iter_replies(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send ``messages`` and yield the replies as they come, for at most ``timeout`` seconds.

        There is at most one reply a message, in no particular order. A node that is unknown or goes offline answers
        with an error (``Message.has_error``); one that is only slow does not answer at all. When the iteration ends,
        for whatever reason, the messages without a reply are withdrawn, so that no client works on a dead round.
        """
        batch = list(messages)
        deadline = None if timeout is None else time.monotonic() + timeout
        ids = self.push_messages(batch)
        waiting = {message_id for message_id in ids if message_id}
        try:
            for message, message_id in zip(batch, ids, strict=True):
                if not message_id:
                    yield Message(Error(ErrorCode.NODE_UNAVAILABLE, "no such node"), reply_to=message)
            while waiting:
                for reply in self.pull_messages(waiting):
                    waiting.discard(reply.metadata.reply_to_message_id)
                    yield reply
                if deadline is not None and time.monotonic() >= deadline:
                    break
                if waiting:
                    time.sleep(REPLY_INTERVAL_SECONDS)
        finally:
            self._forget(waiting)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send ``messages`` and wait for the replies, see ``iter_replies``."""
        return list(self.iter_replies(messages, timeout=timeout))


def _fingerprint(public_key_pem: bytes) -> str:
    key = load_pem_public_key(public_key_pem)
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


class _LongPoll:
    """ASGI application that holds a client's request for work until there is some, or 15 s have passed.

    Stock Flower answers "nothing" at once, so that a client must ask several times a second to learn of its work in
    time: 100 idle clients would keep a core busy. A stock client notices no difference.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bells: dict[bytes, set[asyncio.Event]] = {}  # touched in the loop's thread only
        self._closed = False

    def ring(self, public_keys: Iterable[bytes]) -> None:
        """Wake the waiting requests of the clients with these keys. Callable from any thread."""
        self._call(self._wake, [b64encode(key) for key in public_keys])

    def close(self) -> None:
        """Answer every waiting request now. Callable from any thread."""
        self._closed = True
        self._call(lambda: self._wake(list(self._bells)))

    def _call(self, function: Any, *arguments: Any) -> None:
        if self._loop is not None:  # None: nobody has asked yet
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(function, *arguments)

    def _wake(self, headers: Sequence[bytes]) -> None:
        for header in headers:
            for bell in self._bells.get(header, ()):
                bell.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PULL_PATH:
            await self._app(scope, receive, send)
            return
        self._loop = asyncio.get_running_loop()
        request = await _read(receive)
        wanted = FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode("ascii")
        key = next((value for name, value in scope["headers"] if name == wanted), b"")
        bell = asyncio.Event()
        self._bells.setdefault(key, set()).add(bell)
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            answer = await self._answer(scope, request, bell, gone)
        finally:
            gone.cancel()
            self._bells[key].discard(bell)
            if not self._bells[key]:
                del self._bells[key]
        for part in answer:
            await send(part)

    async def _answer(
        self, scope: Scope, request: bytes, bell: asyncio.Event, gone: "asyncio.Future[None]"
    ) -> list[MutableMapping[str, Any]]:
        deadline = asyncio.get_running_loop().time() + HOLD_SECONDS
        while not gone.done():
            bell.clear()
            parts: list[MutableMapping[str, Any]] = []

            async def collect(part: MutableMapping[str, Any], parts: list[Any] = parts) -> None:
                parts.append(part)

            await self._app({**scope, "state": {}}, _replay(request), collect)
            remaining = deadline - asyncio.get_running_loop().time()
            idle = parts[0]["status"] == 200 and not any(part.get("body") for part in parts)
            if not idle or remaining <= 0 or self._closed:
                return parts
            ringing = asyncio.ensure_future(bell.wait())
            either: set[asyncio.Future[Any]] = {ringing, gone}
            await asyncio.wait(either, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            ringing.cancel()
        return []


async def _read(receive: Receive) -> bytes:
    body = b""
    while (part := await receive())["type"] == "http.request":
        body += part.get("body", b"")
        if not part.get("more_body", False):
            break
    return body


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes) -> Receive:
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # the client's leaving is watched outside
        raise AssertionError("unreachable")

    return receive


def _fleet_app(factory: LinkStateFactory) -> FastAPI:
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),
        ],
    )
    app.state.linkstate_factory = factory
    app.state.enable_supernode_auth = False  # any key may register
    app.include_router(health.router)
    app.include_router(fleet_router)
    return app


def _bind(address: Address) -> socket.socket:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise CoterieError(
            f"Expected --listen with a host name or address of this machine, found {address.host!r} "
            f"({error.strerror}): use 127.0.0.1, or 0.0.0.0 for every network"
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
            f"Expected to listen on {address}, found: {error.strerror}: choose another address with --listen"
        ) from error
    return listener


def _only_unexpected(record: logging.LogRecord) -> bool:
    """Flower logs each refused request as an error; only its own failures are news."""
    return record.levelno >= logging.ERROR and "[UnexpectedError" in record.getMessage()


def _quiet_flower() -> None:
    if _only_unexpected not in FLOWER_LOGGER.filters:
        FLOWER_LOGGER.addFilter(_only_unexpected)
    # Requests that clients break off, and those still open at the end, are no news either.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def _allow_many_connections() -> None:
    """A client holds up to two connections, and the usual soft limit is 1024 open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _start_run(state: InMemoryLinkState) -> Run:
    run_id = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP)
    task_id = state.get_run_info(run_ids=[run_id])[0].primary_task_id
    if task_id is None or state.claim_task(task_id) is None or not state.activate_task(task_id):
        raise RuntimeError("Flower refused to start a run")
    with state.lock_task_store:
        # The run lives as long as this process. Without this it would need a heartbeat, and a machine that slept
        # for a minute would find its run declared dead.
        state.task_token_store[task_id].active_until = now() + timedelta(days=36500)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task_id, run_id, SUPERLINK_NODE_ID
    return state.get_run_info(run_ids=[run_id])[0]


@contextmanager
def superlink(listen: Address) -> Iterator[EmbeddedGrid]:
    """Run a SuperLink in this process for as long as the context is open.

    The port is bound before anything else: raises ``CoterieError`` when it is in use or the host is not of this
    machine. Clients register with any key. State is in memory. On leaving, waiting clients are answered and the
    server ends within a few seconds, also when an exception such as ``KeyboardInterrupt`` is on its way. One
    SuperLink at a time, since Flower keeps the identity of the run in process-wide variables.
    """
    listener = _bind(listen)
    host, port = listener.getsockname()[:2]
    try:
        _quiet_flower()
        _allow_many_connections()
        factory = LinkStateFactory(
            FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
        )
        state = factory.state()
        if not isinstance(state, InMemoryLinkState):
            raise TypeError(type(state).__name__)
        run = _start_run(state)
        long_poll = _LongPoll(_fleet_app(factory))
        with _serving(long_poll, listener):
            try:
                yield EmbeddedGrid(state, run, Address(host, port), long_poll)
            finally:
                state.finish_task(TaskIdentity.task_id, SubStatus.COMPLETED, "")
                long_poll.close()
    finally:
        listener.close()


@contextmanager
def _serving(app: ASGIApp, listener: socket.socket) -> Iterator[None]:
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="superlink", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the embedded SuperLink did not start")
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join(10)
