"""The two engines against each other: real processes, real sockets, loopback."""

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.main import create_app

from coterie.address import Address
from coterie.client.engine import _Connection, is_stale
from coterie.client.keys import fingerprint, load_or_create_key
from coterie.errors import CoterieError
from coterie.server import port
from coterie.server.engine import FLEET_CALLS, EmbeddedGrid, superlink

CLIENT = Path(__file__).parent / "processes" / "client.py"
PATIENCE = 60.0  # for a machine that is busy with other things
ANY_PORT = Address("127.0.0.1", 0)


class Client:
    """A client process and what it has said so far."""

    def __init__(self, server: Address, key: Path, retry_for: float = PATIENCE) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT), str(server), str(key), str(retry_for)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def start_one(server: Address, name: str = "a", **arguments: Any) -> Client:
        clients.append(Client(server, tmp_path / f"{name}.key", **arguments))
        return clients[-1]

    yield start_one
    for client in clients:
        client.process.kill()
        client.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE:.0f} s in vain for {what}")
        time.sleep(0.02)


def online(grid: EmbeddedGrid, count: int) -> list[int]:
    until(lambda: len(grid.get_node_ids()) == count, f"{count} clients online")
    return grid.get_node_ids()


def order(node: int, action: str, *, ttl: float = PATIENCE, **details: float) -> Message:
    content = RecordDict({"order": ConfigRecord({"action": action, **details})})
    return Message(content, node, "train", ttl=ttl, group_id="1")


def ask(grid: EmbeddedGrid, node: int, action: str, *, timeout: float = PATIENCE, **details: float) -> Message:
    (reply,) = grid.send_and_receive([order(node, action, **details)], timeout=timeout)
    return reply


def nothing_left(grid: EmbeddedGrid) -> bool:
    return not (grid._state.num_message_ins() or grid._state.num_message_res() or len(grid._state.object_store))


def test_rounds_of_three_clients_and_a_clean_end(start: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "HOLD_SECONDS", 10 * PATIENCE)  # a message must wake the client that waits for it
    with superlink(ANY_PORT) as grid:
        clients = [start(grid.address, name) for name in "abc"]
        nodes = online(grid, 3)
        for number in range(4):
            replies = grid.send_and_receive([order(n, "echo", number=number) for n in nodes], timeout=25)
            assert sorted(r.metadata.src_node_id for r in replies) == nodes
            assert [r.content["order"]["number"] for r in replies] == [number] * 3
            assert nothing_left(grid)
        # The clients leave as soon as they have replied: their last replies must not be lost.
        asked = grid.push_messages([order(n, "stop") for n in nodes])
        assert [client.wait() for client in clients] == [0, 0, 0]
        assert grid.get_node_ids() == []
        assert [reply.has_error() for reply in grid.pull_messages(asked)] == [False] * 3
        assert nothing_left(grid)
    assert "port" not in {thread.name for thread in threading.enumerate()}


def test_a_large_array_comes_back_whole(start: Callable[..., Client]) -> None:
    array = np.random.default_rng(1).standard_normal(5_000_000).astype(np.float32)  # four pieces of 5 MiB
    with superlink(ANY_PORT) as grid:
        start(grid.address)
        (node,) = online(grid, 1)
        content = RecordDict({"order": ConfigRecord({"action": "echo"}), "model": ArrayRecord([array])})
        (reply,) = grid.send_and_receive([Message(content, node, "train", ttl=PATIENCE)], timeout=PATIENCE)
        (returned,) = reply.content["model"].to_numpy_ndarrays()
        np.testing.assert_array_equal(returned, array)
        assert nothing_left(grid)


def test_only_clients_calls_are_reachable_from_outside() -> None:
    stock = {path for _, path in PROTOBUF_REQUEST_TYPES} | set(create_app().openapi()["paths"]) - {"/health"}
    closed = {path for path in stock if path.startswith(("/v1/control", "/v1/runtime"))}
    assert len(closed) > 50  # the enumeration works
    paths = sorted(stock | {"/", "/docs", "/openapi.json", "/redoc", "/v1", "/v1/fleet", "/v1/fleet/"})
    with superlink(ANY_PORT) as grid, httpx.Client(base_url=f"http://{grid.address}", timeout=PATIENCE) as http:
        reachable = set()
        for path in paths:
            for method in ("GET", "POST", "PUT", "HEAD", "OPTIONS"):
                answer = http.request(method, path, headers={"content-type": "application/protobuf"})
                if answer.status_code != 404:
                    reachable.add((method, path))
        assert reachable == {("POST", path) for path in FLEET_CALLS}
        assert {path for _, path in reachable}.isdisjoint(closed)
        assert http.get("/health").status_code == 200
        for path in FLEET_CALLS:  # unsigned, or no message at all
            assert http.post(path).status_code == 401
            assert http.post(path, content=b"\xff\xff").status_code == 400
            # A path is compared as a whole: no prefix or encoding trick leads elsewhere.
            assert http.post(f"{path}/../../control/start-run").status_code == 404
            assert http.post(f"{path}/").status_code == 404


def test_a_port_in_use_and_a_foreign_host_are_one_line_errors() -> None:
    with (
        superlink(ANY_PORT) as grid,
        pytest.raises(CoterieError) as in_use,
        superlink(grid.address),
    ):
        pass
    assert str(in_use.value) == (
        f"Expected port {grid.address.port} free on 127.0.0.1, found it in use: choose another with --listen"
    )
    for host in ("no-such-host.invalid", "203.0.113.7"):  # a name and an address that are not this machine's
        with pytest.raises(CoterieError, match=host), superlink(Address(host, 0)):
            pass
    with superlink(grid.address):  # the port is free again at once
        pass


@pytest.mark.parametrize("text", ["", "9092", ":9092", "host", "host:", "host:x", "host:65536", "host:-1", "a:²"])
def test_addresses_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(CoterieError, match="--listen"):
        Address.parse(text, option="--listen")
    with pytest.raises(CoterieError, match="--server"):
        _Connection(text, None, retry_for=1, log=print)  # type: ignore[arg-type]


def test_addresses_are_read_and_written() -> None:
    assert str(Address.parse("[::1]:80", option="--listen")) == "[::1]:80"
    assert Address.parse("[::1]:80", option="--listen") == Address("::1", 80)
    assert Address.parse("localhost:0", option="--listen") == Address("localhost", 0)


def test_a_client_waits_for_its_server_and_comes_back_to_a_restarted_one(start: Callable[..., Client]) -> None:
    with superlink(ANY_PORT) as grid:
        address = grid.address
    client = start(address)
    until(lambda: client.said("waiting for"), "the client to say that it waits")
    seen = []
    for _ in range(2):  # the second SuperLink has never heard of the client
        with superlink(address) as grid:
            (node,) = online(grid, 1)
            assert ask(grid, node, "echo").has_content()
            seen.append(grid.identities())
    assert client.said(f"connected to {address}")
    assert seen[0].keys() != seen[1].keys()
    assert list(seen[0].values()) == list(seen[1].values())


def test_identities_are_the_keys_and_stay_from_run_to_run(tmp_path: Path) -> None:
    keys = [load_or_create_key(tmp_path / name) for name in "ab"]
    runs = []
    for some in (keys, keys[::-1]):
        with superlink(ANY_PORT) as grid:
            connections = [_Connection(str(grid.address), key, retry_for=PATIENCE, log=print) for key in some]
            for connection in connections:
                connection.join()
            runs.append(grid.identities())
            assert list(runs[-1]) == grid.get_node_ids()
            for connection in connections:
                connection.leave()
            assert grid.identities() == {}
    prints = {fingerprint(key) for key in keys}
    assert [set(run.values()) for run in runs] == [prints, prints]
    assert runs[0].keys().isdisjoint(runs[1])


def test_a_vanished_server_ends_in_one_clear_line(start: Callable[..., Client]) -> None:
    with superlink(ANY_PORT) as grid:
        client = start(grid.address, retry_for=3)
        online(grid, 1)
    assert client.wait() == 2
    waiting, error = client.lines
    assert waiting.startswith(f"waiting for {grid.address}: ")
    assert error.startswith(f"error: Expected a server at {grid.address}, found none for 3 s (")


def test_a_killed_client_is_missed_and_restarts_with_its_key(start: Callable[..., Client]) -> None:
    with superlink(ANY_PORT) as grid:
        first = start(grid.address)
        (node,) = online(grid, 1)
        replies = grid.iter_replies([order(node, "sleep", seconds=PATIENCE)], timeout=PATIENCE)
        killer = threading.Thread(target=_kill_when_busy, args=(first,))
        killer.start()
        restarted: list[Client] = []

        def restart() -> None:
            killer.join()
            restarted.append(start(grid.address))

        restarter = threading.Thread(target=restart)
        restarter.start()
        (reply,) = replies
        restarter.join()
        assert reply.error.code == ErrorCode.NODE_UNAVAILABLE
        assert reply.metadata.src_node_id == node
        (second,) = restarted
        assert online(grid, 1) == [node]  # the same key is the same client
        assert second.said("still counts this client as connected")
        assert ask(grid, node, "echo").has_content()
        assert not second.said("got sleep")  # the killed one's message is not handed out again
        assert nothing_left(grid)


def _kill_when_busy(client: Client) -> None:
    until(lambda: client.said("got sleep"), "the client to be busy")
    client.process.kill()
    client.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_makes_a_client_leave_at_once(start: Callable[..., Client], number: signal.Signals) -> None:
    with superlink(ANY_PORT) as grid:
        client = start(grid.address)
        (node,) = online(grid, 1)
        asked = grid.push_messages([order(node, "sleep", seconds=2 * PATIENCE)])
        until(lambda: client.said("got sleep"), "the client to be busy")
        client.process.send_signal(number)
        assert client.wait() == 130
        assert grid.get_node_ids() == []  # it said good-bye, else it would count as online for 20 s
        assert client.lines == ["got sleep", "interrupted"]
        (reply,) = grid.pull_messages(asked)
        assert reply.error.code == ErrorCode.NODE_UNAVAILABLE


def test_a_handler_that_raises_tells_the_server_nothing_and_goes_on(start: Callable[..., Client]) -> None:
    with superlink(ANY_PORT) as grid:
        client = start(grid.address)
        (node,) = online(grid, 1)
        reply = ask(grid, node, "raise")
        assert reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        assert "4711" not in repr(reply)
        assert client.said("ValueError: the data say 4711")
        assert ask(grid, node, "echo").has_content()
        assert ask(grid, node, "fail").has_error()
        assert client.wait() == 2
        assert client.lines[-1] == "error: the ledger is full"


def test_what_comes_after_the_timeout_is_dropped_and_the_next_round_works(start: Callable[..., Client]) -> None:
    with superlink(ANY_PORT) as grid:
        client = start(grid.address)
        (node,) = online(grid, 1)
        assert grid.send_and_receive([order(node, "silence")], timeout=1) == []
        late = order(node, "sleep", seconds=3)
        assert grid.send_and_receive([late], timeout=1) == []
        assert not is_stale(late)
        assert nothing_left(grid)
        until(lambda: client.said("a reply came too late"), "the client to learn that it was late")
        queued = [order(node, "sleep", seconds=1), order(node, "sleep", seconds=1.5)]
        replies = grid.send_and_receive(queued, timeout=PATIENCE)
        assert sorted(float(reply.content["order"]["seconds"]) for reply in replies) == [1, 1.5]  # type: ignore[arg-type]
        assert nothing_left(grid)


class Wire:
    """A TCP relay before a server, which the test can cut."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        self._cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._cut:
                near.close()
                continue
            far = socket.create_connection((self._target.host, self._target.port))
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self._cut = True
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._cut = False

    def close(self) -> None:
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for end in (self._listener, *self._ends):
            end.close()


def test_a_reply_is_delivered_once_the_connection_is_back(start: Callable[..., Client]) -> None:
    with superlink(ANY_PORT) as grid, contextlib.closing(Wire(grid.address)) as wire:
        client = start(wire.address)
        (node,) = online(grid, 1)

        def disturb() -> None:
            until(lambda: client.said("got sleep"), "the client to be busy")
            wire.cut()
            until(lambda: client.said("waiting for"), "the client to notice that it is cut off")
            wire.mend()

        disturber = threading.Thread(target=disturb)
        disturber.start()
        assert ask(grid, node, "sleep", seconds=1).has_content()
        disturber.join()
        assert client.said("connected to")
        assert ask(grid, node, "stop").has_content()
        assert client.wait() == 0
        assert [line for line in client.lines if line.startswith("got")] == ["got sleep", "got stop"]


def test_a_reply_to_a_server_that_is_gone_is_dropped(start: Callable[..., Client]) -> None:
    with superlink(ANY_PORT) as grid:
        client = start(grid.address)
        (node,) = online(grid, 1)
        replies = grid.iter_replies([order(node, "sleep", seconds=2)], timeout=PATIENCE)
        collector = threading.Thread(target=lambda: list(replies), daemon=True)
        collector.start()
        until(lambda: client.said("got sleep"), "the client to be busy")
    with superlink(grid.address) as grid:
        (node,) = online(grid, 1)
        assert ask(grid, node, "echo").has_content()
        assert client.said("a reply was dropped: the server that asked is gone")


def test_a_key_is_one_client_at_a_time(start: Callable[..., Client]) -> None:
    with superlink(ANY_PORT) as grid:
        first = start(grid.address)
        (node,) = online(grid, 1)
        second = start(grid.address, retry_for=3)
        assert second.wait() == 2
        assert "running twice with one key?" in second.lines[-1]
        assert ask(grid, node, "stop").has_content()
        assert first.wait() == 0
        third = start(grid.address)  # the first has said good-bye: its key is free at once
        assert online(grid, 1) == [node]
        assert ask(grid, node, "echo").has_content()
        assert not third.said("waiting")


@pytest.mark.parametrize(("behind", "warned"), [(0.0, False), (60.0, True)])
def test_a_wrong_clock_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: float, warned: bool) -> None:
    lines: list[str] = []
    with superlink(ANY_PORT) as grid:
        key = load_or_create_key(tmp_path / "key")
        connection = _Connection(str(grid.address), key, retry_for=PATIENCE, log=lines.append)
        true_time = time.time
        monkeypatch.setattr("coterie.client.engine.time.time", lambda: true_time() - behind)
        connection.join()
        monkeypatch.undo()
        connection.leave()
    assert len(lines) == warned
    assert all(line.startswith("the server's clock is +") for line in lines)


def test_unknown_nodes_answer_with_an_error_of_their_own() -> None:
    with superlink(ANY_PORT) as grid:
        reply = ask(grid, 2**63 + 5, "echo")
        assert reply.error.code == ErrorCode.NODE_UNAVAILABLE
        assert reply.metadata.src_node_id == 2**63 + 5
        assert nothing_left(grid)
        assert grid.send_and_receive([], timeout=1) == []


def test_a_message_is_stale_once_its_time_is_over() -> None:
    with superlink(ANY_PORT):
        message = order(5, "echo", ttl=100)
    now = time.time()
    message.metadata.created_at = now - 99
    assert not is_stale(message)
    message.metadata.created_at = now - 101
    assert is_stale(message)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[EmbeddedGrid, _Connection]]:
    """A server, and a client in this process that the test moves by hand."""
    with superlink(ANY_PORT) as grid:
        key = load_or_create_key(tmp_path / "peer.key")
        connection = _Connection(str(grid.address), key, retry_for=PATIENCE, log=print)
        connection.join()
        yield grid, connection
        connection.leave()


def push(connection: _Connection, header: Message, root: Any) -> None:
    """What a hostile client can send: a header that the server checks, and any object as the reply itself."""
    header.metadata.__dict__["_message_id"] = root.object_id
    request = PushMessagesRequest(
        node=connection._node,
        messages_list=[message_to_proto(header)],
        message_object_trees=[get_object_tree(root)],
    )
    answer = connection._client.PushMessages(request)
    objects = get_all_nested_objects(root)
    for object_id in answer.objects_to_push:
        part = PushObjectRequest(
            node=connection._node,
            run_id=header.metadata.run_id,
            object_id=object_id,
            object_content=objects[object_id].deflate(),
            session_id=answer.session_id,
        )
        assert connection._client.PushObject(part).stored


def received(connection: _Connection) -> Message:
    message = None
    while message is None:
        message = connection.receive()
    return message


def test_a_client_cannot_speak_for_another(peer: tuple[EmbeddedGrid, _Connection]) -> None:
    grid, connection = peer
    (node,) = grid.get_node_ids()
    replies = grid.iter_replies([order(node, "echo")], timeout=PATIENCE)
    collected: list[Message] = []
    collector = threading.Thread(target=lambda: collected.extend(replies))
    collector.start()
    message = received(connection)
    forged = Message(message.content, reply_to=message)
    header = message_from_proto(message_to_proto(forged))
    header.content = RecordDict()
    forged.metadata.__dict__["_src_node_id"] = 12345
    forged.metadata.__dict__["_reply_to_message_id"] = "f" * 64
    push(connection, header, forged)
    collector.join(PATIENCE)
    (reply,) = collected
    assert reply.has_content()
    assert reply.metadata.src_node_id == node
    assert reply.metadata.reply_to_message_id == message.metadata.message_id


def test_a_reply_that_is_no_message_is_an_error_not_a_crash(peer: tuple[EmbeddedGrid, _Connection]) -> None:
    grid, connection = peer
    (node,) = grid.get_node_ids()
    collected: list[Message] = []
    replies = grid.iter_replies([order(node, "echo")], timeout=PATIENCE)
    collector = threading.Thread(target=lambda: collected.extend(replies))
    collector.start()
    message = received(connection)
    header = Message(RecordDict(), reply_to=message)
    push(connection, header, ConfigRecord({"not": "a message"}))
    collector.join(PATIENCE)
    (reply,) = collected
    assert reply.error.code == ErrorCode.UNKNOWN
    assert reply.metadata.src_node_id == node
    assert nothing_left(grid)


def test_an_unfinished_reply_of_a_client_that_left_is_an_error(peer: tuple[EmbeddedGrid, _Connection]) -> None:
    grid, connection = peer
    (node,) = grid.get_node_ids()
    collected: list[Message] = []
    replies = grid.iter_replies([order(node, "echo")], timeout=PATIENCE)
    collector = threading.Thread(target=lambda: collected.extend(replies))
    collector.start()
    reply = Message(RecordDict(), reply_to=received(connection))
    reply.metadata.__dict__["_message_id"] = reply.object_id
    request = PushMessagesRequest(
        node=connection._node,
        messages_list=[message_to_proto(reply)],
        message_object_trees=[get_object_tree(reply)],
    )
    assert connection._client.PushMessages(request).objects_to_push  # and none of them is ever sent
    connection.leave()
    collector.join(PATIENCE)
    (error,) = collected
    assert error.error.code == ErrorCode.NODE_UNAVAILABLE
    assert nothing_left(grid)


def test_a_message_that_cannot_be_read_does_not_end_the_client(
    start: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "HOLD_SECONDS", 0.5)  # nobody rings for a message that is slipped in below
    with superlink(ANY_PORT) as grid:
        client = start(grid.address)
        (node,) = online(grid, 1)
        state, run_id = grid._state, grid.run.run_id
        record = ConfigRecord({"not": "a message"})
        session = state.start_session(run_id)
        state.preregister_object_tree(get_object_tree(record), session)
        state.store_object(run_id, session, record.object_id, record.deflate())
        header = message_from_proto(message_to_proto(Message(RecordDict(), node, "train")))
        header.metadata.__dict__["_message_id"] = record.object_id
        assert state.store_message_ins(header) == record.object_id
        until(lambda: client.said("cannot be read"), "the client to notice")
        assert ask(grid, node, "echo").has_content()


def test_the_right_digest_of_a_known_key() -> None:
    """The fingerprint is SHA-256 over the DER SubjectPublicKeyInfo, computed here by hand."""
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.derive_private_key(7, ec.SECP384R1())
    numbers = key.public_key().public_numbers()
    point = b"\x04" + numbers.x.to_bytes(48, "big") + numbers.y.to_bytes(48, "big")
    # SEQUENCE { SEQUENCE { OID ecPublicKey, OID secp384r1 }, BIT STRING { 0 unused bits, point } }
    der = bytes.fromhex("3076301006072a8648ce3d020106052b81040022036200") + point
    assert fingerprint(key) == hashlib.sha256(der).hexdigest()


def test_keys_are_made_once_kept_private_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "key"
    made: list[str] = []
    makers = [threading.Thread(target=lambda: made.append(fingerprint(load_or_create_key(path)))) for _ in range(8)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(set(made)) == 1
    assert len(made) == 8
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]  # no draft is left

    path.write_bytes(b"corrupt")
    with pytest.raises(CoterieError, match="OpenSSH private key"):
        load_or_create_key(path)
    assert path.read_bytes() == b"corrupt"
    with pytest.raises(CoterieError, match="client key"):
        load_or_create_key(tmp_path)
    with pytest.raises(CoterieError, match="client key"):
        load_or_create_key(path / "below-a-file")
