"""Saved models: one safetensors file whose metadata says which task it belongs to."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from coterie.errors import CoterieError
from coterie.parameters import Layout, as_tensors, from_tensors, layout_of
from coterie.storage import write_atomically
from coterie.tasks import BUILT_IN, Task, load_task

FORMAT = "coterie-model-1"


def save_model(
    path: Path,
    task_name: str,
    vector: NDArray[np.float32],
    layout: Layout,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save a model's flat ``vector`` (n,) under its parameter names; ``metadata`` is added to task and
    format.

    After a crash at any moment ``path`` is the old file or the new one, never a part: the content is synced
    under another name in the same folder, which is then renamed.

    Raises ``CoterieError`` for a vector of another length than the layout's, and when the file cannot be
    written.
    """
    if vector.shape != (layout.size,):
        raise CoterieError(f"Expected a vector of shape ({layout.size},) to save, found {vector.shape}")
    tensors = as_tensors(torch.from_numpy(np.ascontiguousarray(vector, dtype=np.float32)), layout)
    content = save(
        {name: tensor.clone() for name, tensor in tensors.items()},
        {**(metadata or {}), "task": task_name, "format": FORMAT},
    )
    try:
        write_atomically(path, content)
    except OSError as error:
        raise CoterieError(f"Expected to write the model to {path}, found: {error}") from error


def load_model(path: Path, *, task_name: str | None = None) -> tuple[Task, nn.Module]:
    """The task and the module (in evaluation mode) of a file that ``save_model`` wrote.

    A model file is data and must not choose code to run: a task that is not built in
    (``package.module:attribute``) is only imported when the caller names the same one as ``task_name``.

    Raises ``CoterieError`` for a missing or damaged file, one without our format mark, another task than
    asked for, parameters that are not the task's, and parameters that are not finite.
    """
    if not path.is_file():
        raise CoterieError(f"Expected a model file at {path}, found {'a folder' if path.is_dir() else 'none'}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise CoterieError(f"Expected a safetensors model at {path}, found: {error}") from error
    if metadata.get("format") != FORMAT or "task" not in metadata:
        raise CoterieError(
            f"Expected a model saved by coterie (format {FORMAT}) at {path}, found format "
            f"{metadata.get('format', 'unknown')!r}"
        )
    found = metadata["task"]
    if found != task_name and (task_name is not None or found not in BUILT_IN):
        trust = "" if task_name else f"; name it with --task {found} if you trust that code"
        raise CoterieError(f"Expected a model of task {task_name or 'built in'} at {path}, found {found!r}{trust}")
    task = load_task(found)
    module = task.build()
    try:
        vector = from_tensors(tensors, layout_of(module))
    except CoterieError as error:
        raise CoterieError(f"{path}: {error}") from error
    if not np.isfinite(vector).all():
        raise CoterieError(f"Expected finite parameters in {path}, found NaN or infinity")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(tensors[name])
    return task, module.eval()
