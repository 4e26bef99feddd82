r"""Workload H in Apple's pfl, by its public interface. Run by ``simulation.py`` with a Python that has pfl 0.6.0:

    python pfl_program.py workload.npz --rounds 30 --sampled 100 --step-size 0.05 --batch-size 10 --radii 0.1 0.1 \
        --noise-multiplier 3

The file holds ``inputs`` (rows, 3), ``targets`` (rows, 1), ``counts`` (N,) and ``hypotheses`` (k, 11). A sampled user
evaluates k networks on its rows, trains the best in one epoch of batches of 10, and sends the change, clipped and with
Gaussian noise layer by layer; the server averages by network. Prints client-rounds a second, between the first round's
end and the last's, as JSON.
"""

import argparse
import json
import logging
import sys
import time

import numpy as np
import pfl
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import nn

COUNTS = "users of each network"
LAYERS = (("0.weight", "0.bias"), ("2.weight", "2.bias"))


class Networks(nn.Module):
    """k networks 3 → 2 → 1; ``chosen`` is the one that trains."""

    def __init__(self, hypotheses: np.ndarray) -> None:
        super().__init__()
        self.networks = nn.ModuleList(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)) for _ in hypotheses)
        self.chosen = 0
        for network, vector in zip(self.networks, hypotheses, strict=True):
            nn.utils.vector_to_parameters(torch.from_numpy(vector), network.parameters())

    def loss_of(self, index: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean squared error of one network."""
        return nn.functional.mse_loss(self.networks[index](inputs), targets)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """What pfl minimises."""
        return self.loss_of(self.chosen, inputs, targets)

    def metrics(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        """Nothing: no evaluation is asked for."""
        return {}


class ChoosingAveraging(FederatedAveraging):
    """Federated averaging of the network that each user takes."""

    def __init__(self, radii: list[float], noise_multiplier: float) -> None:
        super().__init__()
        self._radii = radii
        self._noise_multiplier = noise_multiplier

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        """Choose, train, clip and noise; zeros stand for the networks that were not chosen."""
        module = model.pytorch_model
        inputs, targets = user_dataset.raw_data
        with torch.no_grad():
            losses = [module.loss_of(j, inputs, targets).item() for j in range(len(module.networks))]
        module.chosen = int(np.argmin(losses))
        difference, metrics = super().train_one_user(initial_model_state, model, user_dataset, central_context)
        for layer, radius in zip(LAYERS, self._radii, strict=True):
            tensors = [difference[f"networks.{module.chosen}.{name}"] for name in layer]
            length = torch.sqrt(sum(tensor.square().sum() for tensor in tensors)).item()
            size = sum(tensor.numel() for tensor in tensors)
            # The mean length of the noise is the noise multiplier times the radius, as in the workload of coterie.
            deviation = self._noise_multiplier * radius / size**0.5
            for tensor in tensors:
                tensor.mul_(min(1.0, radius / max(length, 1e-30))).add_(torch.randn_like(tensor), alpha=deviation)
        difference[COUNTS] = nn.functional.one_hot(torch.tensor(module.chosen), len(losses)).float()
        return difference, metrics

    def process_aggregated_statistics(self, central_context, aggregate_metrics, model, statistics):
        """Each network moves by the mean of its own users' changes."""
        counts = statistics[COUNTS]
        means = MappedVectorStatistics()
        for name, total in statistics.items():
            if name != COUNTS:
                means[name] = total / counts[int(name.split(".")[1])].clamp(min=1.0)
        return model.apply_model_update(means)


class Clock(TrainingProcessCallback):
    """When each round ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Never ends training."""
        self.times.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workload")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sampled", type=int, default=100)
    parser.add_argument("--step-size", type=float, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--radii", type=float, nargs=len(LAYERS), required=True)
    parser.add_argument("--noise-multiplier", type=float, required=True)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with np.load(options.workload) as file:
        inputs, targets = torch.from_numpy(file["inputs"]), torch.from_numpy(file["targets"])
        starts = np.cumsum(file["counts"]) - file["counts"]
        rows = {
            index: slice(start, start + count)
            for index, (start, count) in enumerate(zip(starts, file["counts"], strict=True))
        }
        module = Networks(file["hypotheses"])
    users = FederatedDataset(
        lambda user: Dataset([inputs[rows[user]], targets[rows[user]]], user_id=user),
        get_user_sampler("random", list(range(len(rows)))),
    )
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    clock = Clock()
    ChoosingAveraging(options.radii, options.noise_multiplier).run(
        backend=SimulatedBackend(users, users),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=options.rounds,
            evaluation_frequency=options.rounds + 1,
            train_cohort_size=options.sampled,
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=options.step_size, local_batch_size=options.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    with torch.no_grad():
        final = [nn.utils.parameters_to_vector(network.parameters()).norm().item() for network in module.networks]
    rate = options.sampled * (len(clock.times) - 1) / (clock.times[-1] - clock.times[0])
    json.dump({"client_rounds_a_second": rate, "pfl": pfl.__version__, "norms": final}, sys.stdout)


if __name__ == "__main__":
    main()
