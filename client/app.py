"""The client as one warm process (``flower-client``), and as a stock Flower ClientApp."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from coterie.client.assembly import (
    KEY_FILE,
    client_folder,
    data_holder,
    deployed_draws,
    read_dataset,
    task_policy,
)
from coterie.client.engine import is_stale, serve
from coterie.client.fleet import run_fleet
from coterie.client.keys import load_or_create_key
from coterie.client.participation import (
    MODEL_FILE,
    DataHolder,
    Draws,
    answer_train,
    answer_validation,
    keep_model,
)
from coterie.client.statement import statement
from coterie.config import ClientSettings, load_settings
from coterie.errors import CoterieError
from coterie.flower import from_record, to_record
from coterie.protocol import HypothesesMessage, MalformedMessage, Refusal, Reply, TrainRequest
from coterie.tasks import ClientData, Task, load_task
from coterie.terminal import say, say_item

LOG_FILE = "client.log"
_FAILED = 2  # Flower's code for a ClientApp that raised


def answer(holder: DataHolder, message: Message) -> Message | None:
    """The reply to one Flower message, or None when its round is over. A malformed message is refused."""
    reply = _reply(holder, message)
    return None if reply is None else Message(to_record(reply.to_fields()), reply_to=message)


def _reply(holder: DataHolder, message: Message) -> Reply | None:
    try:
        fields = from_record(message.content)
        if message.metadata.message_type == "train":
            request = TrainRequest.parse(fields)
            return answer_train(holder, request, is_stale=lambda: is_stale(message))
        if message.metadata.message_type == "evaluate":
            return answer_validation(holder, HypothesesMessage.parse(fields))
        if message.metadata.message_type == "query":
            return keep_model(holder, HypothesesMessage.parse(fields))
        return Refusal("Expected a message of type train, evaluate or query")
    except MalformedMessage as error:
        return Refusal(f"malformed request: {error}")


def take_part(settings: ClientSettings, *, log: Callable[[str], None]) -> int:
    """Run one data holder, or a fleet of them, until the server ends the run. The exit status."""
    task = load_task(settings.task)
    dataset = read_dataset(settings, task)
    for note in dataset.notes:
        log(note)
    log(f"{len(dataset.clients)} data holder(s), task {task.name}, state in {settings.state}")
    for item in statement(settings, task_policy(settings, task)):
        say_item(item)
    if settings.fleet is None:
        take_part_as(settings, task, dataset.clients[0], log=log)
        return 0
    first = dataset.clients[0].name
    log(f"each client writes its own {LOG_FILE}; of the fleet, {first} also speaks here")

    def run_one(data: ClientData) -> None:
        file = client_folder(settings, data.name) / LOG_FILE
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise CoterieError(f"Expected --state to be a writable folder, found: {error}") from error

        def to_file(line: str) -> None:
            with file.open("a", encoding="utf-8") as opened:
                opened.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
            if data.name == first:
                log(line)

        take_part_as(settings, task, data, log=to_file)

    status = run_fleet(dataset.clients, run_one, name=lambda data: data.name, log=log)
    log(f"the fleet has ended with status {status}")
    return status


def take_part_as(
    settings: ClientSettings,
    task: Task,
    data: ClientData,
    *,
    log: Callable[[str], None],
    draws: Callable[[int], Draws] = deployed_draws,
) -> None:
    """Be one data holder until the run is over. Raises ``CoterieError`` when the ledger or the server fails."""

    def say_name(line: str) -> None:
        log(f"{data.name}: {line}")

    with data_holder(settings, task, data, draws) as holder:
        for note in holder.notes:
            say_name(note)
        warm = _Warm(holder, log=say_name)
        key = load_or_create_key(holder.folder / KEY_FILE)
        serve(settings.server, key, warm.handle, retry_for=settings.retry_for, log=say_name, stop=lambda: warm.over)


@dataclass
class _Warm:
    """The handler of a client that stays, and whether the run is over."""

    holder: DataHolder
    log: Callable[[str], None]
    over: bool = False

    def handle(self, message: Message) -> Message | None:
        reply = answer(self.holder, message)
        if message.metadata.message_type == "query":
            self.over = True
            kept = reply is not None and from_record(reply.content).scalars.get("kind") == "acknowledgement"
            model = f"the model is {self.holder.folder / MODEL_FILE}" if kept else "no model was kept"
            self.log(f"the run is over, {model}")
        return reply


app = ClientApp()


@app.train()
def stock_train(message: Message, context: Context) -> Message:
    """The stock path: a SuperNode's node config gives the settings."""
    return _stock(message, context)


@app.evaluate()
def stock_evaluate(message: Message, context: Context) -> Message:
    """The stock path, validation."""
    return _stock(message, context)


@app.query()
def stock_query(message: Message, context: Context) -> Message:
    """The stock path, the end of a run."""
    return _stock(message, context)


def _stock(message: Message, context: Context) -> Message:
    """Answer in a process of its own: Flower's partition-id and num-partitions name the client of a shared file.

    What goes wrong is said here only: Flower would send an exception's text, which may quote data, to the server.
    """
    try:
        reply = _stock_reply(message, context)
    except Exception as error:
        say(f"error: {error}" if isinstance(error, CoterieError) else f"error: {type(error).__name__}: {error}")
        reply = None
    return reply or Message(Error(_FAILED, "the client failed"), reply_to=message)


def _stock_reply(message: Message, context: Context) -> Message | None:
    values = {key.replace("-", "_"): value for key, value in context.node_config.items()}
    partition, parts = int(values.pop("partition_id", 0)), values.pop("num_partitions", None)
    settings = load_settings(ClientSettings, None, {**values, "fleet": parts})
    task = load_task(settings.task)
    clients = read_dataset(settings, task).clients
    if not 0 <= partition < len(clients):
        raise CoterieError(f"Expected partition-id from 0 to {len(clients) - 1}, found {partition}")
    with data_holder(settings, task, clients[partition]) as holder:
        reply = answer(holder, message)
    if reply is None:
        raise CoterieError("the round is over: nothing was charged and nothing is sent")
    return reply
