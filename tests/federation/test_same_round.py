"""Deployed processes and plain function calls give the same numbers, round for round, from the same seeds."""

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie.client.assembly import client_folder, data_holder, read_dataset
from coterie.client.keys import fingerprint, load_or_create_key
from coterie.client.participation import answer_train
from coterie.config import Assignment, Weighting
from coterie.parameters import Layout
from coterie.protocol import PrivacyProposal, TrainRequest, UpdateReply, Vector
from coterie.server.hypotheses import average, initial_hypotheses
from coterie.server.reseeding import Choices, ReseedSettings, draws_of_round, reseed
from coterie.server.roster import Roster
from coterie.tasks import load_task
from tests.federation.conftest import PATIENCE, Run
from tests.processes import seeded_fleet

CLIENTS, ROUNDS, K, SAMPLED, SEED = 5, 3, 3, 3, 11
RESEED_AFTER = 1


@pytest.mark.parametrize("assignment", list(Assignment))
def test_the_deployed_rounds_are_the_functions_rounds(
    run: Run, address: str, tmp_path: Path, assignment: Assignment
) -> None:
    server = run(
        *("flower-server", "--listen", address, "--task", "digits", "--hypotheses", K, "--rounds", ROUNDS),
        *("--clients-per-round", SAMPLED, "--min-clients", CLIENTS, "--seed", SEED, "--validation-fraction", 0.2),
        *("--assignment", assignment, "--validate-every", ROUNDS, "--reseed-after", RESEED_AFTER, "--out", "out"),
    )
    deployed_state = tmp_path / "deployed"
    fleet = run(Path(sys.executable), seeded_fleet.__file__, address, deployed_state, CLIENTS)
    _, said = server.communicate(timeout=PATIENCE)
    fleet_said, _ = fleet.communicate(timeout=PATIENCE)
    assert server.returncode == 0, said
    assert fleet.returncode == 0, fleet_said

    expected, layout = _by_functions(deployed_state, tmp_path / "functions", assignment)
    for j in range(K):
        tensors = load_file(tmp_path / f"out/hypothesis-{j}.safetensors")
        found = np.concatenate([tensors[entry.name].reshape(-1) for entry in layout.entries])
        assert np.array_equal(found, expected[j])


def _by_functions(deployed_state: Path, state: Path, assignment: Assignment) -> tuple[Vector, Layout]:
    deployed = seeded_fleet.settings_for("127.0.0.1:1", deployed_state, CLIENTS)
    settings = deployed.model_copy(update={"state": state})
    task = load_task(settings.task)
    clients = {
        # The roles and the samples follow the deployed clients' keys.
        fingerprint(load_or_create_key(client_folder(deployed, data.name) / "key.pem")): data
        for data in read_dataset(settings, task).clients
    }
    hypotheses, layout = initial_hypotheses(task, K, SEED)
    choices, reseeded = Choices(), 0
    roster = Roster.split(clients.keys(), 0.2, SEED)
    trainers = [name for name in clients if not roster.validates(name)]
    assert len(trainers) == CLIENTS - 1
    with ExitStack() as stack:
        holders = {
            name: stack.enter_context(
                data_holder(settings, task, clients[name], lambda r, n=clients[name].name: seeded_fleet.draws_of(n, r))
            )
            for name in trainers
        }
        for number in range(1, ROUNDS + 1):
            request = TrainRequest(
                *("any", number, task.name, hypotheses, assignment, Weighting.EQUAL),
                *(task.training, PrivacyProposal()),
            )
            replies = [
                answer_train(holders[name], request, is_stale=lambda: False)
                for name in sorted(roster.sample(trainers, SAMPLED, number))
            ]
            updates = [reply for reply in replies if isinstance(reply, UpdateReply)]
            assert len(updates) == SAMPLED
            averaged = average(hypotheses, updates, assignment, Weighting.EQUAL)
            renewed = reseed(
                *(averaged.hypotheses, averaged.counts, choices, ReseedSettings(after=RESEED_AFTER)),
                rng=partial(draws_of_round, SEED, number),
            )
            hypotheses, choices, reseeded = renewed.hypotheses, renewed.choices, reseeded + len(renewed.indices)
    assert reseeded, "these rounds should show the server's re-seeding too"
    return hypotheses, layout
