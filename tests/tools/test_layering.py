"""The layers: each module knows only those beneath it, and `import cupyfuse` needs NumPy alone."""

from __future__ import annotations

import ast
import configparser
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import cupyfuse

PACKAGE = Path(cupyfuse.__file__).parent
# Rooms from the bottom to the top; those of one line do not know each other.
LAYERS = (
    "errors devices",
    "dtypes generated settings",
    "ir",
    "trace rewrite",
    "plan",
    "cuda",
    "engines",
    "api",
    "dask torch selftest",
    "cli",
    "__main__",
)
# All that lies at the top of the package beside its rooms.
TOP = {"__main__", "devices", "dtypes", "errors", "generated", "settings"}
LEVEL = {name: level for level, line in enumerate(LAYERS) for name in line.split()}
FOUND = [info for info in pkgutil.walk_packages([str(PACKAGE)], "cupyfuse.") if "kernels_cu" not in info.name]
PACKAGES = {info.name.removeprefix("cupyfuse.") for info in FOUND if info.ispkg}
MODULES = sorted(info.name.removeprefix("cupyfuse.") for info in FOUND)


def level_of(module: str) -> int:
    """The layer of a module: its own, or that of the package it belongs to; -1 if it has none."""
    return LEVEL.get(module, LEVEL.get(module.split(".")[0], -1))


def path_of(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if module in PACKAGES else path.with_suffix(".py")


def exists(name: str) -> bool:
    return name.startswith("cupyfuse.") and name.removeprefix("cupyfuse.") in MODULES


def imported(module: str) -> set[str]:
    """The modules of the package that a module imports, in whatever part of it."""
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("cupyfuse")}
        elif isinstance(node, ast.ImportFrom):
            package = ["cupyfuse", *module.split(".")][: None if module in PACKAGES else -1]
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name if exists(name := f"{source}.{a.name}") else source for a in node.names}
    return {name.removeprefix("cupyfuse.") for name in found if exists(name)}


@pytest.mark.parametrize("module", [m for m in MODULES if m not in PACKAGES or level_of(m) >= 0])
def test_modules_know_only_those_beneath_them(module: str) -> None:
    level = level_of(module)
    assert level >= 0, f"{module} has no place in LAYERS"
    for other in imported(module):
        below, same = level_of(other), other.split(".")[0] == module.split(".")[0]
        assert below < level or same, f"{module} (layer {level}) imports {other} (layer {below})"


def test_no_files_import_each_other() -> None:
    """Not even when functions run, or for the sake of types."""
    waiting = {module: imported(module) - {module} for module in MODULES}
    while free := {module for module, others in waiting.items() if not others & waiting.keys()}:
        waiting = {module: others for module, others in waiting.items() if module not in free}
    assert not waiting, f"in circles, or above one: {sorted(waiting)}"


def test_the_top_holds_rooms_and_what_all_of_them_need() -> None:
    assert {m for m in MODULES if "." not in m and m not in PACKAGES} == TOP


def test_the_layers_exist() -> None:
    """A module that was renamed must not leave its rule behind."""
    assert set(LEVEL) <= set(MODULES)


@pytest.mark.parametrize("module", [m for m in MODULES if 0 <= level_of(m) < LEVEL["cuda"]])
def test_planning_touches_no_array_library_but_numpy(module: str) -> None:
    text = path_of(module).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert not {n.split(".")[0] for n in names} & {"cupy", "cupyx", "torch", "scipy"}


@pytest.mark.parametrize("module", MODULES)
def test_frontends_import_their_libraries_alone(module: str) -> None:
    others = {"torch": {"torch"}, "dask": {"dask", "distributed"}}
    others.pop(module.split(".")[0], None)
    for node in ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert {n.split(".")[0] for n in names}.isdisjoint(set().union(*others.values()))


def run(code: str) -> str:
    """Run code in an interpreter of its own; the warnings it gives are errors."""
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


HEAVY = "cupy cupyx torch scipy ml_dtypes rich matplotlib cuda hypothesis jax dask distributed"
LOADED = f"import sys; print(*(m for m in {HEAVY.split()} if m in sys.modules))"
# A chain with every kind of step, in float32 on NumPy arrays.
WORK = """
import numpy as np, cupyfuse as cf
@cf.fuse
def chain(x, w): return cf.softmax(cf.gelu(x @ w.T) - (x @ w.T).mean(axis=0), axis=1), (x @ w.T).sum()
x = np.ones((4, 3), np.float32)
chain(x, x); chain.bind(w=x)(x); print(chain.plan(x, x)); cf.logsumexp(x, axis=1)
"""


def test_importing_the_package_loads_numpy_alone() -> None:
    assert run(f"import cupyfuse; {LOADED}").split() == []


def test_importing_the_package_loads_nothing_that_writes_cuda() -> None:
    code = "import sys, cupyfuse; print(*(m for m in sys.modules if m.startswith('cupyfuse.cuda')))"
    assert run(code).split() == []


def test_working_with_numpy_arrays_loads_numpy_alone() -> None:
    assert run(f"{WORK}\n{LOADED}").splitlines()[-1].split() == []


def test_the_package_works_where_nothing_else_is_installed() -> None:
    """Every optional library made impossible to import."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY.split()}))"
    assert "plan of chain" in run(f"{blocked}\n{WORK}")


def test_bfloat16_without_ml_dtypes_says_what_is_missing() -> None:
    code = """
import sys; sys.modules['ml_dtypes'] = None
import cupyfuse as cf
try: cf.fuse(lambda x: x.astype('bfloat16').dtype).plan(cf.spec(3))
except TypeError as error: print(error)
print(cf.fuse(lambda x: x + 1).plan(cf.spec(3, 'bfloat16')).launches)
"""
    lines = run(code).splitlines()
    assert "pip install ml_dtypes" in lines[0] and lines[-1] == "1"


def test_every_package_is_installed() -> None:
    """`setup.cfg` names each of them: one that it forgets is missing from an installed copy alone."""
    setup = configparser.ConfigParser()
    setup.read(PACKAGE.parent / "setup.cfg")
    listed = set(setup["options"]["packages"].split()) - {"cupyfuse.heads", "cupyfuse.kernels_cu"}
    assert listed == {"cupyfuse", *(f"cupyfuse.{name}" for name in PACKAGES - {"heads"})}


def test_every_public_name_exists() -> None:
    assert sorted(cupyfuse.__all__) == sorted(set(cupyfuse.__all__))
    for name in cupyfuse.__all__:
        assert getattr(cupyfuse, name) is not None
    assert cupyfuse.__doc__ and cupyfuse.__version__.count(".") == 2
