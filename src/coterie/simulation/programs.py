"""A task's loss and gradient for many parameter vectors at once, by torch.func, over any module.

``vmap`` over small models spends its time in dispatch, not in arithmetic. So each function is run once per shape
through ``make_fx``, which records the plain tensor operations that ``vmap`` and ``grad`` come down to, and the
recording is what is called from then on: the same operations, without the layers that found them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from coterie.parameters import as_tensors, layout_of
from coterie.tasks import Task

aten = torch.ops.aten
CPU = torch.device("cpu")

RowValues = Callable[[Tensor, Tensor], Tensor]  # outputs, targets -> one value a row


def programs_of(task: Task, device: torch.device = CPU) -> "Programs":
    """The task's programs, one for all simulations of this process, so that nothing is recorded twice."""
    return _programs(task.build, task.loss, task.score, device)


class Programs:
    """The batched functions of one task's model.

    A module whose ``forward`` branches on the values of its inputs cannot be batched: torch raises then, at the
    first call.
    """

    def __init__(self, build: Callable[[], nn.Module], loss: RowValues, score: RowValues, device: torch.device) -> None:
        """A task's ``build``, ``loss`` and ``score``, and where the tensors of all calls are. The model's own
        parameters are replaced at each call.
        """
        self._model = build().to(device)
        self._layout = layout_of(self._model)
        self._loss = loss
        self._score = score
        self._recorded: dict[Any, Callable[..., Any]] = {}
        self._draws = False

    def losses(self, hypotheses: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Losses (S, k, rows) of S stacks of k hypotheses (S, k, n), each stack on its own rows (S, rows, …)."""
        found: Tensor = self._run(_evaluate, self._one_loss, hypotheses, inputs, targets)
        return found

    def losses_and_scores(self, hypotheses: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As ``losses``, and the scores beside them."""
        losses, scores = self._run(_evaluate, self._one_loss_and_score, hypotheses, inputs, targets)
        return losses, scores

    def gradients(self, vectors: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """∇ of Σ_b weights·loss for C clients: vectors (C, n), a batch each (C, B, …), weights (C, B); (C, n).

        Dropout draws for each client on its own, from torch's global generator: what a client draws depends on how
        many others are in the batch.
        """
        found: Tensor = self._run(_train, self._one_gradient, vectors, inputs, targets, weights)
        return found

    def can_batch(self, inputs: Tensor, targets: Tensor) -> bool:
        """Whether torch can batch the model's gradient and scores; tried on two clients' rows (2, 1, …)."""
        vectors = torch.zeros((len(inputs), self._layout.size), dtype=inputs.dtype, device=inputs.device)
        try:
            with torch_seeded(0, inputs.device):  # as before in the end
                self.gradients(vectors, inputs, targets, inputs.new_ones(inputs.shape[:2]))
                self.losses_and_scores(vectors[:, None], inputs, targets)
        except Exception:  # whatever an own module's forward raises under vmap
            return False
        return True

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers, as dropout does: known once ``gradients`` has recorded a shape."""
        return self._draws

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

    def _run(self, batched: Callable[..., Any], one: Callable[..., Any], *arguments: Tensor) -> Any:
        key = (one.__name__, *((tensor.shape, tensor.dtype) for tensor in arguments))

        def plain(*own: Tensor) -> Any:
            """Without the signature of the method in it, by which make_fx would count the arguments."""
            return batched(one)(*own)

        with torch.no_grad():
            if key not in self._recorded:
                self._model.train(batched is _train)
                # Recording runs the operations, too: what they draw must not shift the draws that count.
                with torch_seeded(0, arguments[0].device):
                    recorded = make_fx(plain)(*arguments)
                _drop_idle_operations(recorded)
                self._draws = self._draws or _draws(recorded)
                self._recorded[key] = recorded.forward
            return self._recorded[key](*arguments)


_programs = lru_cache(maxsize=8)(Programs)


def _evaluate(one: Callable[..., Any]) -> Callable[..., Any]:
    return vmap(vmap(one, in_dims=(0, None, None)))


def _train(one: Callable[..., Any]) -> Callable[..., Any]:
    return vmap(one, randomness="different")


def _draws(recorded: GraphModule) -> bool:
    """Whether an operation takes numbers from a generator of torch, whatever module or function called it."""
    return any(
        torch.Tag.nondeterministic_seeded in node.target.tags
        for node in recorded.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    )


@contextmanager
def torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators of the CPU and ``device`` start from ``seed``, and are in the end as they were before."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device there is
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _drop_idle_operations(recorded: GraphModule) -> None:
    """Remove what batching leaves behind and changes nothing: views and expansions to the same shape, x·1 and x^1.

    They are a third of a small model's recording, and each costs as much as an operation that computes.
    """
    same_shape = {aten.expand.default, aten.view.default, aten._unsafe_view.default}
    same_value = {aten.mul.Scalar, aten.pow.Tensor_Scalar}
    for node in list(recorded.graph.nodes):
        if node.target not in same_shape | same_value:
            continue
        source, value = node.args[0], node.args[1]
        before, after = source.meta["val"], node.meta["val"]
        like = (before.shape, before.dtype, before.stride()) == (after.shape, after.dtype, after.stride())
        if like and (node.target in same_shape or value == 1):
            node.replace_all_uses_with(source)
            recorded.graph.erase_node(node)
    recorded.recompile()
