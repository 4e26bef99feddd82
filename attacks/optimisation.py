"""Minimisers over the rows that are sought: box-constrained L-BFGS, and what the literature uses."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor

Objective = Callable[[Tensor], Tensor]  # (variables,) -> scalar, differentiable


@dataclass(frozen=True)
class Minimum:
    """Where a minimiser stopped: ``point`` (variables,), the objective there, and how often it was evaluated."""

    point: Tensor
    value: float
    evaluations: int


def bounded_lbfgs(
    objective: Objective,
    start: NDArray[np.float64],
    bounds: tuple[float, float] | None,
    iterations: int,
    *,
    enough: float = -np.inf,
) -> Minimum:
    """scipy's L-BFGS-B in float64 from ``start`` (variables,), inside ``bounds``; stops at a value of ``enough``.

    The objective is divided by its gradient's largest element at the start: near a random initialisation losses are
    of the order of 1e-6, and the stopping rules would end the search there. Non-finite values count as 1e10.
    """
    scale = 0.0
    evaluations = 0

    def evaluate(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        nonlocal scale, evaluations
        evaluations += 1
        variables = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        value = objective(variables)
        (slope,) = torch.autograd.grad(value, variables)
        if scale == 0.0:
            scale = max(float(slope.abs().max()), 1e-300)
        if not bool(torch.isfinite(value)) or not bool(torch.isfinite(slope).all()):
            return 1e10, np.zeros_like(point)
        return float(value.detach()) / scale, slope.numpy() / scale

    def watch(intermediate_result: OptimizeResult) -> None:
        if intermediate_result.fun * scale <= enough:
            raise StopIteration

    found = minimize(
        evaluate,
        start,
        callback=watch,
        jac=True,
        method="L-BFGS-B",
        bounds=None if bounds is None else [bounds] * start.size,
        options={"maxiter": iterations, "maxfun": 2 * iterations, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-10},
    )
    return Minimum(torch.from_numpy(np.asarray(found.x)), float(found.fun) * scale, evaluations)


def signed_adam(
    objective: Objective, start: Tensor, bounds: tuple[float, float], iterations: int, step_size: float
) -> Minimum:
    """Adam on the gradient's sign, cut to ``bounds`` after each step; the step size falls tenfold at 3/8, 5/8 and 7/8.

    Geiping et al. 2020, section 4 and its reference code.
    """
    variables = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([variables], lr=step_size)
    milestones = [iterations * eighths // 8 for eighths in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    value = torch.tensor(float("inf"))
    for _ in range(iterations):
        value = objective(variables)
        (slope,) = torch.autograd.grad(value, variables)
        variables.grad = slope.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            variables.clamp_(*bounds)
    return Minimum(variables.detach(), float(objective(variables).detach()), iterations + 1)


def torch_lbfgs(objective: Objective, start: Tensor, iterations: int, line_search: str | None) -> Minimum:
    """torch's L-BFGS with step size 1 and up to 20 inner steps, ``iterations`` times, as the published attacks use it.

    Ends early once the value is not finite or has stopped changing; the best point seen at an outer step is kept.
    """
    variables = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([variables], lr=1.0, line_search_fn=line_search)
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        value = objective(variables)
        (variables.grad,) = torch.autograd.grad(value, variables)
        return value.detach()

    best, best_value, previous = start.clone(), float("inf"), float("inf")
    for _ in range(iterations):
        before = variables.detach().clone()
        value = float(optimizer.step(closure))  # type: ignore[no-untyped-call]  # the value at ``before``
        if not np.isfinite(value):
            break
        if value < best_value:
            best, best_value = before, value
        if abs(previous - value) <= 1e-12 * abs(previous) and previous < np.inf:
            break
        previous = value
    last = float(objective(variables).detach())
    if np.isfinite(last) and last < best_value:
        best, best_value = variables.detach().clone(), last
    return Minimum(best, best_value, evaluations)
