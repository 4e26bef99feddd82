"""How fast noise is made: nanoseconds per coordinate, beside memory bandwidth and the peers, in one run.

    python benchmarks/noise.py [--json FILE]

Every row is the best of several passes over all rows, so that a busy moment does not fall on one row alone. Peers
that cannot be imported are left out: ``pip install opacus diffprivlib opendp``. Run it on a quiet machine.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from coterie import rng
from coterie.mechanisms.l2_laplace import L2Laplace

SLOW_COORDINATES = 2_000  # for peers that draw one coordinate at a time


@dataclass(frozen=True)
class Row:
    """One thing to time: ``run`` makes ``coordinates`` numbers of ``bits`` bits each."""

    name: str
    bits: int
    coordinates: int
    run: Callable[[], object]


def ours(n: int, pool: ThreadPoolExecutor) -> list[Row]:
    """The key stream, the normals and the whole mechanism; two threads make two vectors at once."""
    piece = 1 << 15  # coordinates whose key stream is made at a time, 256 KiB
    zeros, streams = bytes(8 * piece), np.empty((2, 8 * piece + 16), np.uint8)
    encryptors = [Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor() for _ in range(2)]

    def key_stream(thread: int) -> None:
        for start in range(0, n, piece):
            length = 8 * min(piece, n - start)
            encryptors[thread].update_into(memoryview(zeros)[:length], streams[thread].data)

    secure, mechanism, update = rng.secure(), L2Laplace(n, 1.0), np.zeros(n, np.float32)
    doubles, singles = np.empty((2, n)), np.empty((2, n), np.float32)

    def both(make: Callable[[int], object]) -> Callable[[], object]:
        return lambda: list(pool.map(make, range(2)))

    def normals(thread: int) -> None:
        secure.standard_normal(out=doubles[thread])

    def single_normals(thread: int) -> None:
        secure.standard_normal(dtype=np.float32, out=singles[thread])

    def release(thread: int) -> None:
        mechanism(update, rng=secure)

    seeded = rng.seeded(1)
    return [
        Row("AES-256-CTR key stream alone", 64, n, lambda: key_stream(0)),
        Row("AES-256-CTR key stream alone, 2 threads", 64, 2 * n, both(key_stream)),
        Row("SecureGenerator normals", 64, n, lambda: normals(0)),
        Row("SecureGenerator normals, 2 threads", 64, 2 * n, both(normals)),
        Row("SecureGenerator normals", 32, n, lambda: single_normals(0)),
        Row("SecureGenerator normals, 2 threads", 32, 2 * n, both(single_normals)),
        Row("L2Laplace release, SecureGenerator", 64, n, lambda: release(0)),
        Row("L2Laplace release, SecureGenerator, 2 threads", 64, 2 * n, both(release)),
        Row("L2Laplace release, numpy PCG64 (not for real noise)", 64, n, lambda: mechanism(update, rng=seeded)),
    ]


def peers(n: int) -> list[Row]:
    """Insecure generators, and the privacy libraries that are installed."""
    pcg = np.random.default_rng(1)
    double, single = np.empty(n), np.empty(n, np.float32)
    tensor, tensor_single = torch.empty(n, dtype=torch.float64), torch.empty(n)
    rows = [
        Row("numpy PCG64 normals", 64, n, lambda: pcg.standard_normal(out=double)),
        Row("numpy PCG64 normals", 32, n, lambda: pcg.standard_normal(dtype=np.float32, out=single)),
        Row("torch normal_", 64, n, tensor.normal_),
        Row("torch normal_", 32, n, tensor_single.normal_),
    ]
    for library in (lambda: opacus(tensor_single), diffprivlib, opendp):
        try:
            rows += library()
        except ImportError as error:
            print(f"left out: {str(error).partition(' (')[0]}")
    return rows


def opacus(reference: torch.Tensor) -> list[Row]:
    """Opacus's noise for DP-SGD, plain and in its secure mode."""
    from opacus.optimizers.optimizer import _generate_noise

    n = reference.numel()
    return [
        Row("Opacus noise", 32, n, lambda: _generate_noise(1.0, reference)),
        Row("Opacus noise, secure mode", 32, n, lambda: _generate_noise(1.0, reference, secure_mode=True)),
    ]


def diffprivlib() -> list[Row]:
    """IBM's Laplace mechanism, a call per coordinate."""
    from diffprivlib.mechanisms import Laplace

    mechanism = Laplace(epsilon=1.0, sensitivity=1.0)
    return [
        Row(
            "diffprivlib Laplace",
            64,
            SLOW_COORDINATES,
            lambda: [mechanism.randomise(0.0) for _ in range(SLOW_COORDINATES)],
        )
    ]


def opendp() -> list[Row]:
    """OpenDP's exact sampler of Laplace noise on a vector."""
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l1_distance(T=float)
    measurement = dp.m.make_laplace(*space, scale=1.0)
    zeros = [0.0] * SLOW_COORDINATES
    return [Row("OpenDP Laplace", 64, SLOW_COORDINATES, lambda: measurement(zeros))]


def measure(rows: list[Row], passes: int) -> list[float]:
    """Nanoseconds per coordinate of each row, the best of ``passes`` times three."""
    best = [float("inf")] * len(rows)
    for _ in range(passes):
        for index, row in enumerate(rows):
            row.run()  # warms the caches up after the row before
            for _ in range(3):
                start = time.perf_counter_ns()
                row.run()
                best[index] = min(best[index], (time.perf_counter_ns() - start) / row.coordinates)
    return best


def machine() -> dict[str, str | int | None]:
    """What the figures depend on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].strip() if names else model
    packages = {name: version(name) for name in ("numpy", "cryptography", "torch")}
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()} | packages


def table(results: list[dict[str, object]], copy: float) -> str:
    """A markdown table; the ratios are to copying 8 bytes, and to torch's normals of the same width."""
    torch_speed = {r["bits"]: r["nanoseconds"] for r in results if r["name"] == "torch normal_"}
    lines = ["| noise | float | ns a coordinate | × memory copy | × torch normal_ |", "|---|---|---|---|---|"]
    for result in results:
        taken = float(str(result["nanoseconds"]))
        to_torch = taken / float(str(torch_speed[result["bits"]]))
        lines.append(f"| {result['name']} | {result['bits']} | {taken:.2f} | {taken / copy:.1f} | {to_torch:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--coordinates", type=int, default=1_200_000, help="numbers per vector (1200000)")
    parser.add_argument("--passes", type=int, default=20, help="passes over all rows, best kept (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    for name in ("coordinates", "passes"):
        if getattr(arguments, name) < 1:
            parser.error(f"Expected --{name} >= 1, found {getattr(arguments, name)}")
    torch.set_num_threads(1)
    source = np.ones(1 << 25)  # 256 MiB, beyond any cache
    target = np.empty_like(source)
    with ThreadPoolExecutor(2) as pool:
        copying = Row("memory copy", 64, source.size, lambda: np.copyto(target, source))
        rows = [copying, *ours(arguments.coordinates, pool), *peers(arguments.coordinates)]
        figures = measure(rows, arguments.passes)
    results: list[dict[str, object]] = [
        {"name": row.name, "bits": row.bits, "nanoseconds": figure} for row, figure in zip(rows, figures, strict=True)
    ]
    copy = figures[0]
    found = machine()
    print(", ".join(f"{key} {value}" for key, value in found.items()))
    print(f"{arguments.coordinates} coordinates; memory copy {16 / copy:.1f} GB/s (reads and writes)\n")
    print(table(results, copy))
    if arguments.json:
        report = {"machine": found, "coordinates": arguments.coordinates, "results": results}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
