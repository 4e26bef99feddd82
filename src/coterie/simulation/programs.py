"""A task's loss and gradient for many parameter vectors at once, by torch.func, over any module.

``vmap`` over small models spends its time in dispatch, not in arithmetic. So each function is run once per shape
through ``make_fx``, which records the plain tensor operations that ``vmap`` and ``grad`` come down to, and the
recording is what is called from then on: the same operations, without the layers that found them.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from coterie.parameters import as_tensors, layout_of
from coterie.tasks import Task

RowValues = Callable[[Tensor, Tensor], Tensor]  # outputs, targets -> one value a row


def programs_of(task: Task) -> "Programs":
    """The task's programs, one for all simulations of this process, so that nothing is recorded twice."""
    return _programs(task.build, task.loss, task.score)


class Programs:
    """The batched functions of one task's model.

    A module whose ``forward`` branches on the values of its inputs cannot be batched: torch raises then, at the
    first call.
    """

    def __init__(self, build: Callable[[], nn.Module], loss: RowValues, score: RowValues) -> None:
        """A task's ``build``, ``loss`` and ``score``. The model's own parameters are replaced at each call."""
        self._model = build()
        self._layout = layout_of(self._model)
        self._loss = loss
        self._score = score
        self._recorded: dict[Any, Callable[..., Any]] = {}

    def losses(self, hypotheses: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Losses (S, k, rows) of S stacks of k hypotheses (S, k, n), each stack on its own rows (S, rows, …)."""
        found: Tensor = self._evaluate(self._one_loss, hypotheses, inputs, targets)
        return found

    def losses_and_scores(self, hypotheses: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As ``losses``, and the scores beside them."""
        losses, scores = self._evaluate(self._one_loss_and_score, hypotheses, inputs, targets)
        return losses, scores

    def gradients(self, vectors: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """∇ of Σ_b weights·loss for C clients: vectors (C, n), a batch each (C, B, …), weights (C, B); (C, n).

        Dropout draws for each client on its own, from torch's global generator.
        """
        batched = vmap(self._one_gradient, randomness="different")
        found: Tensor = self._run(batched, True, vectors, inputs, targets, weights)
        return found

    def can_batch(self, inputs: Tensor, targets: Tensor) -> bool:
        """Whether torch can batch the model's gradient and scores; tried on two clients' rows (2, 1, …)."""
        vectors = torch.zeros((len(inputs), self._layout.size), dtype=inputs.dtype)
        try:
            self.gradients(vectors, inputs, targets, torch.ones(inputs.shape[:2], dtype=inputs.dtype))
            self.losses_and_scores(vectors[:, None], inputs, targets)
        except Exception:  # whatever an own module's forward raises under vmap
            return False
        return True

    def _evaluate(self, one: Callable[..., Any], hypotheses: Tensor, inputs: Tensor, targets: Tensor) -> Any:
        return self._run(vmap(vmap(one, in_dims=(0, None, None))), False, hypotheses, inputs, targets)

    def _one_loss(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._loss(self._outputs(as_tensors(vector, self._layout), inputs), targets)

    def _one_loss_and_score(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self._outputs(as_tensors(vector, self._layout), inputs)
        return self._loss(outputs, targets), self._score(outputs, targets)

    def _one_gradient(self, vector: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        def weighted(tensors: dict[str, Tensor]) -> Tensor:
            return (self._loss(self._outputs(tensors, inputs), targets) * weights).sum()

        # By tensor, and joined: the derivative of a slice of the vector would be n numbers for each tensor.
        gradient = grad(weighted)(as_tensors(vector, self._layout))
        return torch.cat([gradient[entry.name].reshape(-1) for entry in self._layout.entries])

    def _outputs(self, tensors: dict[str, Tensor], inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self._model, tensors, (inputs,))
        return outputs

    def _run(self, function: Callable[..., Any], training: bool, *arguments: Tensor) -> Any:
        key = (function.__qualname__, *((tensor.shape, tensor.dtype) for tensor in arguments))

        def plain(*own: Tensor) -> Any:
            """The function without the signature of the method in it, by which make_fx would count arguments."""
            return function(*own)

        with torch.no_grad():
            if key not in self._recorded:
                self._model.train(training)
                self._recorded[key] = make_fx(plain)(*arguments).forward
            return self._recorded[key](*arguments)


_programs = lru_cache(maxsize=8)(Programs)
