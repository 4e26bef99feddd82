"""Images and labels from arrays: checked, turned where asked, scaled to ink = 1 on paper = 0."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.datasets.files import read_bytes
from coterie.errors import CoterieError
from coterie.tasks import ClientData

SIDE = 28  # pixels


def read_npz(path: Path, keys: tuple[str, ...]) -> Mapping[str, NDArray[Any]]:
    """The arrays ``keys`` of a numpy .npz file. Raises ``CoterieError`` for anything else."""
    content = read_bytes(path)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            found = list(archive) if hasattr(archive, "files") else ["a single array"]
            missing = [key for key in keys if key not in found]
            if not missing:
                return {key: archive[key] for key in keys}
    except Exception as error:  # the exceptions of numpy and zipfile for damaged bytes are not documented
        raise CoterieError(f"Expected a numpy .npz file at {path}, found: {error or type(error).__name__}") from error
    raise CoterieError(f"Expected arrays {', '.join(keys)} in {path}, found {', '.join(found[:10]) or 'none'}")


def check_images(images: NDArray[Any], labels: NDArray[Any], *, classes: int, place: str) -> None:
    """Raise ``CoterieError`` unless images are (N, 28, 28) with one label in 0..classes−1 each.

    Images are uint8, or finite floats in [0, 1]. ``place`` names the file for the error's reader.
    """
    if images.ndim != 3 or images.shape[1:] != (SIDE, SIDE):
        raise CoterieError(f"Expected images of shape (N, {SIDE}, {SIDE}) in {place}, found {images.shape}")
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise CoterieError(
            f"Expected one integer label for each of {len(images)} images in {place}, "
            f"found {labels.dtype} of shape {labels.shape}"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        row = int(wrong[0])
        raise CoterieError(f"Expected labels 0 to {classes - 1} in {place}, found {labels[row]} at row {row}")
    if images.dtype == np.uint8:
        return
    if not np.issubdtype(images.dtype, np.floating):
        raise CoterieError(f"Expected images of type uint8 or float in {place}, found {images.dtype}")
    # NaN fails both comparisons.
    outside = np.argwhere(~((images >= 0) & (images <= 1)))
    if len(outside):
        row, y, x = map(int, outside[0])
        raise CoterieError(
            f"Expected pixels between 0 and 1 in {place}, found {images[row, y, x]} at row {row}, pixel ({y}, {x})"
        )


def image_client(name: str, images: NDArray[Any], labels: NDArray[Any], *, turned: bool) -> ClientData:
    """A data holder of images: inputs (rows, 1, 28, 28) in [0, 1], ink = 1; turned 90° counter-clockwise on
    demand.

    ``images`` (rows, 28, 28) are uint8 with ink 255, or floats with ink 1, already checked.
    """
    own = np.rot90(images, axes=(1, 2)) if turned else images
    scaled = np.ascontiguousarray(own, dtype=np.float32)
    if images.dtype == np.uint8:
        scaled /= np.float32(255)
    return ClientData(name, torch.from_numpy(scaled[:, None]), torch.from_numpy(labels.astype(np.int64)))
