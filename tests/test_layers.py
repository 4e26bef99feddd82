"""The architecture's rules, read from the source of every product file."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import coterie

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "coterie"
LINKED = ("server", "client", "mechanisms", "attacks")
PUBLIC_FLOWER = {"flwr.app", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.clientapp"}
# What may use what, besides itself; the shared modules are those of src/coterie that are in no linked folder.
SHARED = "shared"

if not PACKAGE.is_dir():
    pytest.skip("the rules are about the source tree, and this is not one", allow_module_level=True)


@dataclass(frozen=True)
class Source:
    """One product file, by the name it is imported by."""

    path: Path
    module: str

    @property
    def layer(self) -> str:
        """The linked folder it is in, or "shared"."""
        part = self.module.split(".")[1] if "." in self.module else SHARED
        return part if part in LINKED else SHARED

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    def imports(self) -> Iterator[str]:
        """Every module that it imports, wherever in the file, as an absolute name."""
        for node in ast.walk(self.tree()):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    package = self.module.split(".")[: -node.level or None]
                    base = ".".join([*package, *([node.module] if node.module else [])])
                yield base
                # "from coterie import client" imports the folder as well.
                yield from (f"{base}.{alias.name}" for alias in node.names)


def product_files() -> list[Source]:
    found = []
    for folder, prefix in [(PACKAGE, "coterie"), *((ROOT / name, f"coterie.{name}") for name in LINKED)]:
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder)
            if folder == PACKAGE and inner.parts[0] in LINKED:
                continue  # reached through the link: counted at its own place
            dotted = ".".join(inner.with_suffix("").parts)
            found.append(Source(path, f"{prefix}.{dotted}".removesuffix(".__init__")))
    return found


FILES = product_files()
ids = [source.module for source in FILES]


def roots(source: Source) -> set[str]:
    return {name.split(".")[0] for name in source.imports()}


def layers_used(source: Source) -> set[str]:
    parts = (name.split(".") for name in source.imports() if name.split(".")[0] == "coterie")
    return {part[1] if len(part) > 1 and part[1] in LINKED else SHARED for part in parts if len(part) > 1}


def test_the_files_are_found() -> None:
    modules = {source.module for source in FILES}
    assert {
        "coterie.tasks",
        "coterie.client.sanitize",
        "coterie.server.strategy",
        "coterie.mechanisms.events",
    } <= modules
    assert "coterie.commands.ledger" in modules


def test_a_relative_import_is_resolved(tmp_path: Path) -> None:
    """The rules below would be blind to it."""
    path = tmp_path / "x.py"
    path.write_text("from . import keys\nfrom ..server import app\nfrom .. import client\n")
    found = set(Source(path, "coterie.client.x").imports())
    assert {"coterie.client.keys", "coterie.server.app", "coterie.client"} <= found


@pytest.mark.parametrize("name", LINKED)
def test_the_links_resolve_to_the_top_level_folders(name: str) -> None:
    link = PACKAGE / name
    assert link.is_symlink()
    assert not Path(link.readlink()).is_absolute()
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


def test_no_top_level_folder_shadows_the_package() -> None:
    assert not (ROOT / "coterie").exists()
    assert Path(coterie.__file__).resolve().parent == PACKAGE


@pytest.mark.parametrize("source", FILES, ids=ids)
def test_files_are_short(source: Source) -> None:
    assert len(source.path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("source", FILES, ids=ids)
def test_names_of_files(source: Source) -> None:
    assert source.name != "utils.py"
    relative = source.module.split(".")[-1]
    assert source.layer != SHARED or source.module.count(".") != 1 or relative not in sys.stdlib_module_names


@pytest.mark.parametrize("source", [s for s in FILES if s.layer == "mechanisms"], ids=lambda s: s.module)
def test_mechanisms_need_numpy_scipy_and_dp_accounting_only(source: Source) -> None:
    allowed = {"numpy", "scipy", "dp_accounting", "coterie", *sys.stdlib_module_names}
    assert roots(source) <= allowed
    assert layers_used(source) <= {"mechanisms"}


@pytest.mark.parametrize("source", FILES, ids=ids)
def test_client_server_and_attacks_use_mechanisms_and_shared_modules_only(source: Source) -> None:
    used = layers_used(source)
    if source.module == "coterie.attacks.observation":
        # The audit attacks what the client's own gate lets out; nothing else of attacks may reach the client.
        assert used <= {"attacks", "client", "mechanisms", SHARED}
    elif source.layer in {"client", "server", "attacks"}:
        assert used <= {source.layer, "mechanisms", SHARED}
    elif source.module not in {"coterie.simulation", "coterie.cli"}:
        assert not {"client", "server"} <= used


@pytest.mark.parametrize("source", FILES, ids=ids)
def test_flower_is_used_in_its_places_only(source: Source) -> None:
    names = {name for name in source.imports() if name == "flwr" or name.startswith("flwr.")}
    if source.layer in {"client", "server"} and source.name == "engine.py":
        return
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(source.tree())
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    private = {m for m in modules if m and (m == "flwr" or m.startswith("flwr.")) and m not in PUBLIC_FLOWER}
    assert not private, f"{source.module} uses Flower's private names"
    allowed = (source.layer in {"client", "server"} and source.name in {"app.py", "strategy.py"}) or (
        source.module == "coterie.flower"
    )
    assert allowed or not names


@pytest.mark.parametrize("source", FILES, ids=ids)
def test_nothing_is_pickled(source: Source) -> None:
    assert not roots(source) & {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.load", "torch.save"}:
            pytest.fail(f"{ast.unparse(node)} reads or writes pickles")


NUMPY_GENERATORS = {"Generator", "default_rng", "SeedSequence", "BitGenerator", "PCG64", "Philox"}


@pytest.mark.parametrize("source", FILES, ids=ids)
def test_no_global_random_numbers(source: Source) -> None:
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"np.random", "numpy.random"}:
            assert node.attr in NUMPY_GENERATORS, f"{source.module}:{node.lineno} uses numpy's global generator"
    assert all(
        name.rpartition(".")[2] in NUMPY_GENERATORS for name in source.imports() if name.startswith("numpy.random.")
    )


@pytest.mark.parametrize("source", [s for s in FILES if s.layer == "mechanisms"], ids=lambda s: s.module)
def test_no_mechanism_makes_its_own_randomness(source: Source) -> None:
    """``rng`` is an argument without a default, so that who calls decides where noise comes from."""
    assert not roots(source) & {"random", "secrets"}
    for node in ast.walk(source.tree()):
        assert not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("default_rng")), node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            assert "rng" not in {a.arg for a in arguments.posonlyargs + arguments.args} or node.name.startswith("_")
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
                assert argument.arg != "rng" or default is None, f"{node.name} has a default for rng"


CLIENT = [s for s in FILES if s.layer == "client"]
GATED = {"UpdateReply", "ValidationReply"}


@pytest.mark.parametrize("source", CLIENT, ids=lambda s: s.module)
def test_only_the_gate_makes_replies_that_carry_data(source: Source) -> None:
    made = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(source.tree())
        if isinstance(node, ast.Call)
    }
    if source.name == "sanitize.py":
        assert made >= GATED
    else:
        assert not made & GATED
        # Another road to the same object: an alias, or copying a reply with other content.
        text = source.path.read_text(encoding="utf-8")
        assert not re.search(r"(UpdateReply|ValidationReply)\s+as\s", text)
        assert not re.search(r"=\s*(UpdateReply|ValidationReply)\b(?!\s*\|)", text)


def test_only_the_gate_takes_a_release_to_the_ledger() -> None:
    for source in CLIENT:
        calls = [
            n.func.attr
            for n in ast.walk(source.tree())
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        ]
        assert ("record_release" in calls) == (source.name == "sanitize.py"), source.module


@pytest.mark.parametrize("module", ["coterie.mechanisms.accounting", "coterie.mechanisms.layerwise"])
def test_mechanisms_load_without_torch_and_flower(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'flwr', 'cryptography'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_flowers_version_is_pinned_to_the_minor_that_was_read() -> None:
    assert re.search(r'"flwr>=1\.42,<1\.43"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_no_path_of_a_machine_is_in_a_product_file() -> None:
    pattern = re.compile(r"(?<![\w./])/(work|farm|root|tmp|home)/\w")
    for source in FILES:
        assert not pattern.search(source.path.read_text(encoding="utf-8")), source.module
