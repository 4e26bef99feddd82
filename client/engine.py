"""The warm loop: one process that stays, takes messages from a SuperLink and answers them.

The only client file that reads Flower's private names (flwr 1.42). Stock Flower starts a Python process per message
and ends the process by ``sys.exit`` or a signal to itself where a connection fails; this loop does neither.
"""

import contextlib
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.logger import FLOWER_LOGGER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from coterie.address import Address
from coterie.client.clock import ServerClock
from coterie.client.outage import Outage
from coterie.errors import CoterieError
from coterie.terminal import terminable

# The server calls a client offline after twice this time without a heartbeat. Short, so that a killed client does
# not hold up a round for long; several heartbeats long, since a client that is only slow would lose paid work.
HEARTBEAT_INTERVAL_SECONDS = 20
HEARTBEAT_EVERY_SECONDS = 7.0
IDLE_SECONDS = (0.1, 0.5)  # between requests to a server that answers at once; coterie's holds them instead
REMEMBERED_MESSAGES = 1000
TOLERATED_CLOCK_DIFFERENCE_SECONDS = 5.0

Request = TypeVar("Request")
Result = TypeVar("Result")


def is_stale(message: Message) -> bool:
    """Whether the server has stopped waiting for the answer: ``created_at + ttl`` has passed on this clock.

    A handler asks before it charges the ledger: a release for a round that is over would be paid for nothing.
    """
    return message.metadata.created_at + message.metadata.ttl <= time.time()


def serve(
    server: str,
    key: ec.EllipticCurvePrivateKey,
    handle: Callable[[Message], Message | None],
    *,
    retry_for: float,
    log: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Answer the messages of the SuperLink at ``server`` (``host:port``) until ``stop()`` is true.

    ``stop`` is asked after each message and at least every half minute. ``handle`` gets each message once and
    returns the reply (``Message(content, reply_to=message)``), or None to stay silent. When it raises, one line is
    logged and the server gets an error without the exception's text, which might quote data; a ``CoterieError``
    is raised on.

    A connection that cannot be made or breaks is tried again, at growing intervals up to 10 s. After ``retry_for``
    seconds without one: ``CoterieError``. A server that was restarted is joined again. One that still counts this
    key as online, as after ``kill -9``, refuses for up to 40 s and is asked again. A reply is sent as long as
    ``handle``'s message is fresh, then dropped.

    SIGTERM and Ctrl-C raise ``KeyboardInterrupt`` here, after the server was told that this client leaves.
    """
    with _quiet_flower(), terminable():
        connection = _Connection(server, key, retry_for=retry_for, log=log)
        try:
            connection.join()
            while not stop():
                message = connection.receive()
                if message is None:
                    continue
                reply, failure = _handled(handle, message, log)
                if reply is not None:
                    connection.send(reply, message)
                if failure is not None:
                    raise failure
        finally:
            connection.leave()


def _handled(
    handle: Callable[[Message], Message | None], message: Message, log: Callable[[str], None]
) -> tuple[Message | None, CoterieError | None]:
    failure = None
    try:
        return handle(message), None
    except CoterieError as error:
        failure = error
    except Exception as error:  # one bad message must not end the client
        log(f"a {message.metadata.message_type!r} message could not be handled: {type(error).__name__}: {error}")
    return _refusal(message), failure


@contextmanager
def _quiet_flower() -> Iterator[None]:
    """What goes wrong is said by ``log``, in this program's words."""
    before, FLOWER_LOGGER.disabled = FLOWER_LOGGER.disabled, True
    try:
        yield
    finally:
        FLOWER_LOGGER.disabled = before


def _refusal(message: Message) -> Message:
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the client failed"), reply_to=message)


class _RejoinError(Exception):
    """The server does not know this client any more."""


class _WithdrawnError(Exception):
    """The server has taken a message back, or its run is over."""


class _Connection:
    """What the server knows this client by, and how calls to it are repeated."""

    def __init__(
        self, server: str, key: ec.EllipticCurvePrivateKey, *, retry_for: float, log: Callable[[str], None]
    ) -> None:
        self._server = str(Address.parse(server, option="--server"))
        self._key = key
        self._retry_for = retry_for
        self._log = log
        self._clock = ServerClock()
        self._client = self._new_client(timeout=30.0)
        self._node_id: int | None = None
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._idle_seconds = IDLE_SECONDS[0]
        self._outage: Outage | None = None
        self._left = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def _new_client(self, *, timeout: float) -> FleetHttpClient:
        signing = NodeAuthHttpInterceptor(self._key, self._key.public_key())
        return FleetHttpClient(
            f"http://{self._server}", interceptors=[self._clock, signing], verify=False, timeout=timeout
        )

    @property
    def _node(self) -> Node:
        return Node(node_id=self._node_id or 0)

    # ---- repeating

    def _persist(self, call: Callable[[Request], Result], request: Request) -> Result:
        """The result of ``call(request)``, repeated while the server cannot be reached or is not ready.

        The first repetition is immediate and silent: a connection that was idle is often found closed.
        """
        tries = 0
        while True:
            tries += 1
            try:
                result = call(request)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            except httpx.HTTPStatusError as error:
                reason = self._judged(error)
            except ValueError:  # an answer that is no protobuf message
                reason = "what answers there is not a coterie server"
            else:
                if self._outage is not None:
                    self._outage.over()
                self._outage = None
                return result
            if tries > 1 or self._outage is not None:
                self._wait(reason)

    def _judged(self, error: httpx.HTTPStatusError) -> str:
        """Why a refused call should be repeated. Raises what ends the repeating."""
        status = error.response.status_code
        flower = FlowerError.from_json(error.response.text)
        if status == httpx.codes.UNAUTHORIZED:
            raise _RejoinError from error
        if flower is not None and flower.code == ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED:
            raise _WithdrawnError from error
        if flower is not None and flower.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            return "it still counts this client as connected (killed before, or running twice with one key?)"
        if status == httpx.codes.NOT_FOUND:
            return "what answers there is not a coterie server"
        return f"it answered {status}"

    def _wait(self, reason: str) -> None:
        if self._outage is None:
            self._outage = Outage(self._server, retry_for=self._retry_for, log=self._log)
        self._outage.wait(reason)

    # ---- joining and leaving

    def join(self) -> None:
        """Register the key, if the server does not know it yet, and come online. Changes the node id if it did not."""
        public_key = public_key_to_bytes(self._key.public_key())
        while True:
            try:
                self._persist(self._register, public_key)
                request = ActivateNodeRequest(public_key=public_key, heartbeat_interval=HEARTBEAT_INTERVAL_SECONDS)
                self._node_id = self._persist(self._client.ActivateNode, request).node_id
                break
            except _RejoinError:
                self._wait(
                    f"it refuses this client's signature, whose time is {self._clock.server_ahead:+.0f} s off the "
                    "server's: set this machine's clock"
                    if abs(self._clock.server_ahead) > TOLERATED_CLOCK_DIFFERENCE_SECONDS
                    else "it refuses this client's signature"
                )
        if abs(self._clock.server_ahead) > TOLERATED_CLOCK_DIFFERENCE_SECONDS:
            self._log(
                f"the server's clock is {self._clock.server_ahead:+.0f} s off this one: "
                "rounds may seem over too early or too late, set this machine's clock"
            )
        if not self._heart.is_alive():
            self._heart.start()

    def _register(self, public_key: bytes) -> None:
        try:
            self._client.RegisterNode(RegisterNodeFleetRequest(public_key=public_key))
        except httpx.HTTPStatusError as error:
            flower = FlowerError.from_json(error.response.text)
            known = (ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE, ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED)
            if flower is None or flower.code not in known:
                raise

    def _beat(self) -> None:
        """Tell the server that this client lives. Failures are found and repaired by the main thread's calls."""
        with self._new_client(timeout=5.0) as client:
            while not self._left.wait(HEARTBEAT_EVERY_SECONDS * random.uniform(0.8, 1.0)):
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    client.SendNodeHeartbeat(
                        SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_INTERVAL_SECONDS)
                    )

    def leave(self) -> None:
        """Tell the server, if it can be reached at once, that this client is gone."""
        self._left.set()
        if self._heart.is_alive():
            self._heart.join(2.0)  # a heartbeat that arrived last would bring this client back online
        if self._node_id is not None and self._outage is None:
            with contextlib.suppress(httpx.HTTPError, ValueError), self._new_client(timeout=2.0) as client:
                client.DeactivateNode(DeactivateNodeRequest(node_id=self._node_id))
        self._client.close()

    # ---- messages

    def receive(self) -> Message | None:
        """The next message, or None when there was none for a while or it could not be had."""
        asked_at = time.monotonic()
        try:
            answer = self._persist(self._client.PullMessages, PullMessagesRequest(node=self._node))
        except _RejoinError:
            self._log(f"{self._server} does not know this client (restarted?): joining again")
            self.join()
            return None
        if not answer.messages_list:
            time.sleep(max(0.0, self._idle_seconds - (time.monotonic() - asked_at)))
            self._idle_seconds = min(self._idle_seconds * 1.5, IDLE_SECONDS[1])
            return None
        self._idle_seconds = IDLE_SECONDS[0]
        header = None
        try:
            header = message_from_proto(answer.messages_list[0])
            if self._is_new(header.metadata.message_id):
                return self._fetch(header, answer.message_object_trees[0])
        except (_WithdrawnError, _RejoinError):
            self._log("the server took a message back before it was received")
        except CoterieError:
            raise
        except Exception as error:  # a malformed message must not end the client
            self._log(f"a message from the server cannot be read: {type(error).__name__}: {error}")
            if header is not None:
                self.send(_refusal(header), header)
        return None

    def _is_new(self, message_id: str) -> bool:
        if message_id in self._seen:
            return False
        self._seen[message_id] = None
        if len(self._seen) > REMEMBERED_MESSAGES:
            self._seen.popitem(last=False)
        return True

    def _fetch(self, header: Message, tree: ObjectTree) -> Message:
        run_id, message_id = header.metadata.run_id, header.metadata.message_id
        contents = {
            node.object_id: self._pull_object(run_id, node.object_id, header) for node in iterate_object_tree(tree)
        }
        request = ConfirmMessageReceivedRequest(node=self._node, run_id=run_id, message_object_id=message_id)
        self._persist(self._client.ConfirmMessageReceived, request)
        message = inflate_object_from_contents(message_id, contents)
        if not isinstance(message, Message):
            raise TypeError(f"expected a message, found {type(message).__name__}")
        message.metadata.__dict__["_message_id"] = message_id
        return message

    def _pull_object(self, run_id: int, object_id: str, header: Message) -> bytes:
        request = PullObjectRequest(node=self._node, run_id=run_id, object_id=object_id)
        while not is_stale(header):
            answer = self._persist(self._client.PullObject, request)
            if not answer.object_found:
                break
            if answer.object_available:
                return answer.object_content
            time.sleep(IDLE_SECONDS[0])  # the server is still storing it
        raise _WithdrawnError

    def send(self, reply: Message, message: Message) -> None:
        """Deliver ``reply``, again after each broken connection, until ``message`` is stale."""
        node_id = self._node_id
        while not is_stale(message):
            try:
                if not self._push(reply):
                    self._log("a reply came too late: the server had stopped waiting for it")
            except _WithdrawnError:
                self._log("a reply was dropped: the run is over")
            except _RejoinError:
                self.join()
                if self._node_id == node_id:
                    continue
                self._log("a reply was dropped: the server that asked is gone")
            return
        self._log("a reply was dropped: the server has stopped waiting for it")

    def _push(self, reply: Message) -> bool:
        """Whether the server took the reply."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            objects = get_all_nested_objects(reply)
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.0],
            )
        # The server answers with what it lacks: of a reply that it wants, all; once it has everything, nothing. An
        # object that it refuses either arrived in a try whose answer was lost, or is not wanted any more: ask again.
        for attempt in range(3):
            answer = self._persist(self._client.PushMessages, request)
            if not answer.objects_to_push:
                return attempt > 0
            parts = (
                PushObjectRequest(
                    node=self._node,
                    run_id=reply.metadata.run_id,
                    object_id=object_id,
                    object_content=objects[object_id].deflate(),
                    session_id=answer.session_id,
                )
                for object_id in answer.objects_to_push
            )
            if all(self._persist(self._client.PushObject, part).stored for part in parts):
                return True
        return False
