"""The rows of every data holder, end to end, and where a ragged batch of them is found."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import CoterieError
from coterie.tasks import ClientData

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """``inputs`` (rows, …) and ``targets`` (rows, …) of N clients; client i's are ``starts[i]`` to + ``counts[i]``.

    Nothing is padded here, so that memory grows with the rows and not with the largest client.
    """

    names: tuple[str, ...]
    inputs: Tensor
    targets: Tensor
    starts: Counts
    counts: Counts

    @classmethod
    def of(cls, clients: Sequence[ClientData]) -> "Rows":
        """The clients' rows in order. Raises ``CoterieError`` for no clients, and for a client without rows."""
        if not clients:
            raise CoterieError("Expected data holders to simulate, found none")
        for client in clients:
            if client.rows == 0:
                raise CoterieError(f"Expected data holder {client.name!r} to have rows, found none")
        counts = np.array([client.rows for client in clients], np.int64)
        return cls(
            tuple(client.name for client in clients),
            torch.cat([client.inputs for client in clients]),
            torch.cat([client.targets for client in clients]),
            np.cumsum(counts) - counts,
            counts,
        )

    def on(self, device: str) -> "Rows":
        """The same rows on torch's device ``cpu``, ``cuda`` or ``cuda:N``, where a simulation of them then computes.

        Raises ``CoterieError`` for another device, and for one that this machine, or this torch, lacks.
        """
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise CoterieError(f"Expected --device to be cpu, cuda or cuda:N, found {device!r}")
        try:
            inputs, targets = self.inputs.to(device), self.targets.to(device)
        except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
            reason = str(error).splitlines()[0]
            raise CoterieError(
                f"Expected --device to be one that torch has here, found {device!r}: {reason}"
            ) from error
        return replace(self, inputs=inputs, targets=targets)

    def client(self, index: int) -> ClientData:
        """One data holder's own rows."""
        own = slice(int(self.starts[index]), int(self.starts[index] + self.counts[index]))
        return ClientData(self.names[index], self.inputs[own], self.targets[own])

    def part(self, clients: Counts, kept: NDArray[np.bool_]) -> "Rows":
        """Some rows of some clients (C,), who are numbered anew from 0: those whose numbers ``kept`` (C, most) has.

        Each must keep one row at least.
        """
        numbers = np.arange(kept.shape[1])
        kept = kept & (numbers < self.counts[clients, None])
        inputs, targets = self.at((self.starts[clients, None] + numbers)[kept])
        counts: Counts = kept.sum(axis=1)
        names = tuple(self.names[client] for client in clients.tolist())
        return Rows(names, inputs, targets, np.cumsum(counts) - counts, counts)

    def block(self, clients: Counts, first: int, width: int) -> tuple[Counts, NDArray[np.bool_]]:
        """Row numbers ``first`` to ``first + width`` of each of ``clients`` (…): places (…, width), and which are real.

        A place beyond a client's last row holds the client's first row, so that what is computed from it is as
        finite as what is computed from the client's own.
        """
        within = np.arange(first, first + width)
        real = within < self.counts[clients][..., None]
        return self.starts[clients][..., None] + np.where(real, within, 0), real

    def at(self, places: Counts) -> tuple[Tensor, Tensor]:
        """Inputs and targets at ``places`` (…), each of shape (…, one row's shape)."""
        index = torch.from_numpy(places.reshape(-1)).to(self.inputs.device)
        inputs, targets = self.inputs.index_select(0, index), self.targets.index_select(0, index)
        return inputs.view(*places.shape, *inputs.shape[1:]), targets.view(*places.shape, *targets.shape[1:])
