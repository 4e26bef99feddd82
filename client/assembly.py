"""A data holder from its settings: its rows, its folder (one process at a time), its ledger, its gate."""

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from coterie.client.ledger import LEDGER_FILE, ROUNDING, Ledger, Session
from coterie.client.participation import DataHolder, Draws
from coterie.client.policy import PrivacyPolicy, policy_for
from coterie.client.sanitize import Gate
from coterie.config import ClientSettings, Selection
from coterie.errors import CoterieError
from coterie.mechanisms.selection import ExponentialSelection, RandomizedArgmin
from coterie.parameters import layout_of
from coterie.rng import secure
from coterie.storage import sync_folder
from coterie.tasks import ClientData, Dataset, DataSource, Task

KEY_FILE = "key.pem"


def read_dataset(settings: ClientSettings, task: Task) -> Dataset:
    """The data holders that the settings ask for: one, or the first ``fleet`` in the task's fixed order.

    Raises ``CoterieError`` for a missing or unreadable file, an unknown partition, or fewer data holders than asked.
    """
    if task.needs_data and settings.data is None:
        raise CoterieError(f"Expected --data FILE for task {task.name!r}, found none")
    partition = settings.partition_by
    if partition is not None and partition not in task.partitions:
        raise CoterieError(f"Expected --partition-by to be one of {', '.join(task.partitions)}, found {partition!r}")
    if settings.fleet is not None and partition is None:
        partition = task.partitions[0]
    found = task.read(DataSource(settings.data, partition, settings.fleet or 1, settings.strict))
    wanted = settings.fleet or 1
    if len(found.clients) < wanted:
        raise CoterieError(f"Expected at least {wanted} data holders in {settings.data}, found {len(found.clients)}")
    if settings.fleet is None and len(found.clients) > 1:
        raise CoterieError(
            f"Expected one data holder in {settings.data}, found {len(found.clients)}: "
            f"add --fleet N, or leave --partition-by away to take the file as one"
        )
    for client in found.clients[:wanted]:
        if client.rows == 0:
            raise CoterieError(f"Expected data holder {client.name!r} to have rows, found none")
        if not (torch.isfinite(client.inputs).all() and torch.isfinite(client.targets).all()):
            raise CoterieError(f"Expected finite numbers in the rows of {client.name!r}, found some that are not")
    return Dataset(found.clients[:wanted], found.notes)


def client_folder(settings: ClientSettings, name: str) -> Path:
    """The state folder of one client: ``--state`` itself, or a folder of its name below it for a fleet."""
    if settings.fleet is None:
        return settings.state
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    if safe != name:  # two names must never share a folder, and with it a budget
        safe += "-" + hashlib.sha256(name.encode()).hexdigest()[:12]
    return settings.state / safe


def deployed_draws(_round: int) -> Draws:
    """Real randomness: noise from the operating system's entropy, and an order of rows nobody can repeat."""
    return Draws(noise=secure(), order=np.random.default_rng())


@contextmanager
def data_holder(
    settings: ClientSettings, task: Task, data: ClientData, draws: Callable[[int], Draws] = deployed_draws
) -> Iterator[DataHolder]:
    """Open one data holder's folder and ledger for as long as the context lasts.

    ``draws`` other than the default is for simulation and tests. Raises ``CoterieError`` when the folder cannot be
    written, is in use by another process, or its ledger is unusable: before anything is trained.
    """
    folder = client_folder(settings, data.name)
    with _locked(folder), _own_ledger(folder) as ledger:
        model = task.build()
        layout = layout_of(model)
        session = Session(
            client=data.name,
            task=task.name,
            data_fingerprint=_fingerprint(data),
            budget=settings.budget,
            delta=settings.delta,
            noise_multiplier=settings.noise_multiplier,
        )
        before = ledger.latest_session()
        if before != session:
            ledger.record_session(session)
        notes: tuple[str, ...] = ()
        if before is not None and before.data_fingerprint != session.data_fingerprint:
            notes = ("the data have changed since the last run: what was spent before still counts",)
        gate = Gate(
            policy=policy_for(settings, layout, task.clipping_norm),
            selection=_selection(settings),
            ledger=ledger,
            budget=settings.budget,
            validation=settings.validation,
            share_sample_count=settings.share_sample_count,
        )
        yield DataHolder(data.name, task, model, layout, data, gate, folder, settings.fine_tune, draws, notes)


def task_policy(settings: ClientSettings, task: Task) -> PrivacyPolicy:
    """The policy that the settings mean for a task's model.

    Raises ``CoterieError`` for a budget below the cost of a single release: such a client could never train.
    """
    policy = policy_for(settings, layout_of(task.build()), task.clipping_norm)
    each = policy.release_loss + (settings.selection_epsilon or 0.0)
    if settings.budget * (1 + ROUNDING) < each:
        raise CoterieError(
            f"Expected --budget of at least {each:.6g}, the cost of one release, found {settings.budget:g}: "
            f"raise it, or --noise-multiplier"
        )
    return policy


def _selection(settings: ClientSettings) -> RandomizedArgmin | ExponentialSelection | None:
    epsilon, bound = settings.selection_epsilon, settings.selection_loss_bound
    if settings.selection is Selection.RANDOMIZED and epsilon is not None:
        return RandomizedArgmin(epsilon)
    if settings.selection is Selection.EXPONENTIAL and epsilon is not None and bound is not None:
        return ExponentialSelection(epsilon, bound)
    return None


def _fingerprint(data: ClientData) -> str:
    digest = hashlib.sha256()
    for tensor in (data.inputs, data.targets):
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _own_ledger(folder: Path) -> Ledger:
    file = folder / LEDGER_FILE
    if (folder / KEY_FILE).exists() and not (file.is_file() and file.stat().st_size):
        # A new one would start at zero, as if nothing had ever left.
        raise CoterieError(f"Expected the ledger {file} beside {KEY_FILE}, found none: restore it from a backup")
    return Ledger(file, create=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for created in (folder, folder.absolute().parent, folder.absolute().parent.parent):
            sync_folder(created)  # a ledger in a folder that a power cut undoes would be gone with its rows
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise CoterieError(f"Expected --state to be a writable folder, found: {error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CoterieError(
                f"Expected {folder} to be used by one client at a time, found another running: stop it first"
            ) from error
        yield
    finally:
        os.close(descriptor)
