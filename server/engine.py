"""The embedded SuperLink: Flower's server inside this process.

The only server file that reads Flower's private names (flwr 1.42). Stock Flower serves three APIs on the port that
clients use; two of them, Control and Runtime, let a peer submit code and claim the run. Here they do not exist: from
outside, only the calls in ``FLEET_CALLS`` can be made, and this process talks to the link state directly.
"""

import hashlib
import json
import logging
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)
from fastapi import HTTPException, Request
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, SubStatus
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
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
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.serverapp import Grid
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.date import now
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.logger import FLOWER_LOGGER
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from flwr.superlink.servicer.fleet import fleet_handlers
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.datastructures import Headers

from coterie.address import Address
from coterie.server.port import NOT_FOUND, Answer, Port, RawHeaders, bind, serving

REPLY_INTERVAL_SECONDS = 0.05
_log = logging.getLogger(__name__)


class EmbeddedGrid(Grid):
    """Flower's ``Grid`` over the link state of this process: no HTTP between the strategy and the SuperLink."""

    def __init__(self, state: InMemoryLinkState, run: Run, address: Address, port: Port) -> None:
        self.address = address
        self._state = state
        self._run = run
        self._port = port
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
        self._port.ring(
            b64encode(node.public_key)
            for node in self._state.get_node_info(node_ids=[m.metadata.dst_node_id for m in batch])
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


@dataclass(frozen=True)
class _Call:
    """A call that a client can make: what it sends, and Flower's function that answers."""

    request_type: Any  # a protobuf message class; protobuf has no types
    handle: Callable[[Any, InMemoryLinkState], Any]


# All of the Fleet API but three calls: get-run and get-fab serve code to run, and unregister-node burns a key.
FLEET_CALLS = {
    "/v1/fleet/register-node": _Call(
        RegisterNodeFleetRequest,
        lambda request, state: fleet_handlers.register_node(request, state, enable_supernode_auth=False),
    ),
    "/v1/fleet/activate-node": _Call(ActivateNodeRequest, fleet_handlers.activate_node),
    "/v1/fleet/deactivate-node": _Call(DeactivateNodeRequest, fleet_handlers.deactivate_node),
    "/v1/fleet/send-node-heartbeat": _Call(SendNodeHeartbeatRequest, fleet_handlers.send_node_heartbeat),
    "/v1/fleet/pull-messages": _Call(
        PullMessagesRequest,
        lambda request, state: fleet_handlers.pull_messages(request, state, state.object_store),
    ),
    "/v1/fleet/push-messages": _Call(PushMessagesRequest, fleet_handlers.push_messages),
    "/v1/fleet/push-object": _Call(PushObjectRequest, fleet_handlers.push_object),
    "/v1/fleet/pull-object": _Call(PullObjectRequest, fleet_handlers.pull_object),
    "/v1/fleet/confirm-message-received": _Call(
        ConfirmMessageReceivedRequest,
        lambda request, state: fleet_handlers.confirm_message_received(request, state, state.object_store),
    ),
}


class _FleetApi:
    """Answers clients' calls as stock Flower does, one after the other."""

    def __init__(self, state: InMemoryLinkState) -> None:
        self._state = state
        # What Flower's authentication looks for in its web application.
        self._application = SimpleNamespace(
            state=SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: state))
        )

    def respond(self, path: str, raw_headers: RawHeaders, body: bytes) -> Answer:
        """Check the client's signature and make the call. Whatever a client sends, it never raises."""
        call = FLEET_CALLS.get(path)
        if call is None:
            return NOT_FOUND
        headers = Headers(raw=list(raw_headers))
        try:
            request = call.request_type.FromString(body)
            authenticate_node(
                cast(
                    Request,
                    SimpleNamespace(
                        app=self._application, headers=headers, state=SimpleNamespace(protobuf_request=request)
                    ),
                )
            )
            response = call.handle(request, self._state)
        except FlowerError as error:
            kind = API_ERROR_MAP[error.code]
            answer = error.to_json(kind.public_message)
            return Answer(kind.http_status_code, json.dumps(answer).encode(), b"application/json")
        except HTTPException as error:
            return Answer(error.status_code)
        except DecodeError:
            return Answer(400)
        except Exception as error:
            _log.warning("a client's call of %s failed: %s: %s", path, type(error).__name__, error)
            return Answer(500)
        idle = isinstance(response, PullMessagesResponse) and not response.messages_list
        return Answer(
            200,
            response.SerializeToString(),
            PROTOBUF_MEDIA_TYPE.encode("ascii"),
            wait_for=headers[FLEET_HTTP_PUBLIC_KEY_HEADER].encode("ascii") if idle else None,
        )


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
def _quiet_flower() -> Iterator[None]:
    """Flower logs every call, and as an error every refused one; what matters to the user is said by the caller."""
    before, FLOWER_LOGGER.disabled = FLOWER_LOGGER.disabled, True
    try:
        yield
    finally:
        FLOWER_LOGGER.disabled = before


@contextmanager
def superlink(listen: Address) -> Iterator[EmbeddedGrid]:
    """Run a SuperLink in this process for as long as the context is open.

    The port is bound before anything else: raises ``CoterieError`` when it is in use or the host is not of this
    machine. Clients register with any key. State is in memory. On leaving, waiting clients are answered and the
    server ends within a few seconds, also when an exception such as ``KeyboardInterrupt`` is on its way. One
    SuperLink at a time, since Flower keeps the identity of the run in process-wide variables.
    """
    with bind(listen) as listener:
        host, port_number = listener.getsockname()[:2]
        state = InMemoryLinkState(NoOpFederationManager(), InMemoryObjectStore())
        run = _start_run(state)
        port = Port(_FleetApi(state).respond)
        with _quiet_flower(), serving(port, listener):
            try:
                yield EmbeddedGrid(state, run, Address(host, port_number), port)
            finally:
                state.finish_task(TaskIdentity.task_id, SubStatus.COMPLETED, "")
