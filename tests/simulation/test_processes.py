"""A sweep's stacks in processes of their own: the same results, the same progress, and how they end."""

import multiprocessing
import os
from dataclasses import replace

import numpy as np
import pytest

from coterie.errors import CoterieError
from coterie.simulation import SimulatedRun, processes
from coterie.simulation.processes import in_processes
from coterie.simulation.rows import Rows
from coterie.simulation.sweep import in_this_process
from coterie.tasks import ClientData, Task

Brisk = tuple[Task, list[ClientData]]
BASE = SimulatedRun(rounds=3, clients_per_round=4, validate_every=1)
STACKS = [[replace(BASE, hypotheses=k, seed=seed) for seed in (0, 1)] for k in (1, 2, 3)]


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_the_results_are_those_of_one_process(brisk: Brisk, monkeypatch: pytest.MonkeyPatch) -> None:
    task, clients = brisk
    told: dict[int, int] = {}
    expected = dict(in_this_process(task, Rows.of(clients), STACKS, told.__setitem__))
    assert told == {0: 6, 1: 6, 2: 6}
    told.clear()
    starts: list[int] = []
    real = processes._start
    monkeypatch.setattr(processes, "_start", lambda *given: starts.append(1) or real(*given))  # type: ignore[func-returns-value]
    found = dict(in_processes(task, Rows.of(clients), STACKS, told.__setitem__))
    assert len(starts) == 3
    assert found == expected
    assert told == {0: 6, 1: 6, 2: 6}
    assert not multiprocessing.active_children()


def test_a_single_stack_has_no_process(brisk: Brisk, monkeypatch: pytest.MonkeyPatch) -> None:
    task, clients = brisk
    monkeypatch.delattr(processes, "_start")
    assert len(dict(in_processes(task, Rows.of(clients), STACKS[:1], lambda *_: None))) == 1


def test_a_stack_that_fails_says_why(brisk: Brisk) -> None:
    task, clients = brisk
    unlike = [replace(BASE, seed=0), replace(BASE, seed=1, rounds=4)]
    with pytest.raises(CoterieError, match="stacked runs to differ in seed"):
        dict(in_processes(task, Rows.of(clients), [unlike, STACKS[0]], lambda *_: None))
    assert not multiprocessing.active_children()


def test_a_tasks_own_error_is_one_line_with_its_type_and_text(brisk: Brisk) -> None:
    def report(mean: float) -> float:
        raise RuntimeError(f"no figure\nfor {mean:.0f}{'0' * 1000}")

    task, clients = brisk
    own = replace(task, name="own:task", report=report)
    expected = r"^Expected task 'own:task' to be simulated, found RuntimeError: no figure for .*…; with --seeds 1"
    with pytest.raises(CoterieError, match=expected) as caught:
        dict(in_processes(own, Rows.of(clients), STACKS, lambda *_: None))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 450
    assert not multiprocessing.active_children()


def test_a_process_that_dies_is_one_line(brisk: Brisk, monkeypatch: pytest.MonkeyPatch) -> None:
    task, clients = brisk
    monkeypatch.setattr(processes, "simulate", lambda *_, **__: os._exit(9))
    with pytest.raises(CoterieError, match="was memory short"):
        dict(in_processes(task, Rows.of(clients), STACKS, lambda *_: None))


def test_processes_end_with_the_sweep(brisk: Brisk) -> None:
    task, clients = brisk
    endless = [[replace(BASE, rounds=1_000_000, seed=seed)] for seed in (0, 1)]
    finished = in_processes(task, Rows.of(clients), [STACKS[0], *endless], lambda *_: None)
    assert next(finished)[0] == 0
    assert multiprocessing.active_children()
    finished.close()
    assert not multiprocessing.active_children()


def test_a_process_ends_without_its_parent() -> None:
    rounds = np.zeros(1, np.int64)
    processes._note(rounds, os.getppid(), 3)
    assert rounds.tolist() == [3]
    with pytest.raises(SystemExit):
        processes._note(rounds, os.getpid(), 4)
