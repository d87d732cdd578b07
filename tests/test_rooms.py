"""Who may import whom: without it the house grows circles, and nobody can read, test or replace one room alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("serve_targets", "train_drafter", "prepare_data", "evaluate_drafter")


def modules_of_the_map():
    """Dotted modules below common/ in the order of the map's table, lowest first."""
    found = []
    for line in (ROOT / "common" / "README.md").read_text().splitlines():
        columns = [column.strip() for column in line.strip("|").split("|")]
        if line.startswith("| ") and len(columns) == 3 and columns[0] != "room":
            prefix = "common" if columns[0] == "(ground)" else f"common.{columns[0]}"
            found += [f"{prefix}.{name.strip()}" for name in columns[2].split(",")]
    return found


MODULES = modules_of_the_map()
ORDER = [*MODULES, *SCRIPTS]
ALONE = {
    "torch.distributed": {"common.distributed"},
    "transformers": {"common.data.chat", "common.target", "common.decoding", "common.generation", "evaluate_drafter"},
}
"""Packages that few rooms know; the script only reports transformers' version."""


def tree_of(module):
    return ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())


def imports_of(module):
    """Dotted names that a module imports anywhere, or reaches as an attribute (`torch.distributed.all_reduce`)."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: write `from common import x`, not a relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def within(name, package):
    return name == package or name.startswith(f"{package}.")


def test_every_module_is_on_the_map():
    """A module outside the map would escape every rule below, and nobody would find it."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "common").rglob("*.py") if p.name != "__init__.py"}
    assert files == set(MODULES) and len(MODULES) == len(set(MODULES))


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_downwards(module):
    """A low room that knows a high one cannot be tested or reused without it."""
    imports = imports_of(module)
    ours = {other for other in ORDER if any(within(name, other) for name in imports)}
    above = ours - set(ORDER[: ORDER.index(module)]) - {module}
    assert not above, f"{module} imports {sorted(above)}, which stand above it"


@pytest.mark.parametrize("package", ALONE)
def test_packages_that_few_rooms_know(package):
    """Modes are told apart in distributed/ only; transformers is slow to import and changes between releases."""
    knows = {module for module in ORDER if any(within(name, package) for name in imports_of(module))}
    strangers = {module for module in knows if not any(within(module, allowed) for allowed in ALONE[package])}
    assert not strangers


@pytest.mark.parametrize("module", ORDER)
def test_a_file_has_one_duty(module):
    """Files that grow without end are read by nobody."""
    lines = len((ROOT / (module.replace(".", "/") + ".py")).read_text().splitlines())
    assert lines <= 330


def public_functions(tree, prefix=""):
    """(name, function) of what other files may call; a class's __init__ and __call__ are called by its name."""
    for node in tree.body:
        public = not node.name.startswith("_") if hasattr(node, "name") else False
        if isinstance(node, ast.ClassDef) and public:
            yield from public_functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (public or node.name in ("__init__", "__call__")):
            yield prefix + node.name, node


def not_annotated(function):
    """Names of the arguments without a type, and "return" where the result has none."""
    a = function.args
    arguments = [x for x in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if x is not None]
    bare = [x.arg for x in arguments if x.annotation is None and x.arg not in ("self", "cls")]
    return bare + ["return"] * (function.returns is None and function.name != "__init__")


@pytest.mark.parametrize("module", ORDER)
def test_public_functions_are_annotated(module):
    """Without types an editor cannot lead a reader from a call to what it takes, and the type checker checks nothing."""
    bare = {name: found for name, function in public_functions(tree_of(module)) if (found := not_annotated(function))}
    assert not bare, f"{module}: {bare}"


DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def does_something(statement):
    if isinstance(statement, ast.If):
        inside = [*statement.body, *statement.orelse]
        return ast.unparse(statement.test) != "__name__ == '__main__'" and any(map(does_something, inside))
    if isinstance(statement, ast.Expr):
        registers = re.match(r"\w+\.register_\w+\(", ast.unparse(statement))  # a custom operator's gradient is part of its definition
        return not (isinstance(statement.value, ast.Constant) or registers)
    return not isinstance(statement, DEFINITIONS)


@pytest.mark.parametrize("module", MODULES)
def test_importing_only_defines(module):
    """An import that acts makes results depend on who imported what first."""
    acts = [f"line {s.lineno}: {ast.unparse(s).splitlines()[0]}" for s in tree_of(module).body if does_something(s)]
    assert not acts, f"{module} does something when imported: {acts}"


IMPORT_ALL = """
import signal, sys, threading, torch, transformers
def state():
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    return torch.get_rng_state().sum().item(), torch.get_num_threads(), torch.get_default_dtype(), threading.active_count(), handlers
before = state()
for module in sys.argv[1:]:
    try:
        __import__(module)
    except ModuleNotFoundError as missing:
        assert missing.name == "triton", missing
assert state() == before and not torch.cuda.is_initialized(), "importing changed the process's state"
"""


def test_importing_leaves_no_trace():
    """Output, a CUDA context or another random state from an import reaches every script and every rank."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, *MODULES], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_launch_holds_no_program():
    """What starts the suite is shell and YAML that a cluster's admin can read; logic there is tested by nobody."""
    files = [p for p in (ROOT / "launch").rglob("*") if p.is_file() and ROOT / "launch" / "quickstart" not in p.parents]
    assert {p.suffix for p in files} <= {".sh", ".sbatch", ".yaml", ".md", ".txt"}, files
