"""What holds the project together: who imports whom, public names, file sizes, and words that must not be there."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
FILES = sorted(SOURCE.rglob("*.py"))

# who may import whom; CONTRIBUTING.md draws the same list
ARROWS = {
    "errors": set(),
    "files": {"errors"},
    "torchrun": {"errors"},
    "schedule": {"errors", "files"},
    "model": {"errors", "files"},
    "report": {"errors", "files", "schedule"},
    "planning": {"errors", "files", "schedule", "model", "report"},
    "catalog": {"schedule", "planning"},
    "schedules": {"errors", "catalog", "schedule", "planning", "model"},
    "decide": {"errors", "schedule", "model", "planning", "schedules", "report"},
    "explain": {"errors", "decide", "schedule", "model", "planning", "schedules", "report"},
    "runtime": {"errors", "torchrun", "schedule", "model"},
    "pipeline": {"errors", "decide", "schedule", "model", "planning", "schedules", "report", "runtime", "__init__"},
    "metrics": {"errors"},
    "timing": {"errors", "model"},
    "feeding": {"errors", "model", "runtime", "pipeline"},
    "doctor": {"errors", "timing", "report", "feeding"},
    "infer": {"errors", "model", "runtime"},
    "checkpoint": {"errors", "schedule", "pipeline", "__init__"},
    "faults": {"errors", "schedule", "model", "report", "planning", "schedules", "runtime", "pipeline"},
    "training": {"errors", "torchrun", "report", "runtime", "pipeline", "feeding", "checkpoint", "faults"},
    "launch": {
        "errors",
        "torchrun",
        "decide",
        "schedule",
        "model",
        "report",
        "schedules",
        "runtime",
        "pipeline",
        "faults",
        "training",
        "__init__",
    },
    "__main__": {"cli"},
    "__init__": {
        "errors",
        "explain",
        "schedules",
        "model",
        "planning",
        "report",
        "pipeline",
        "metrics",
        "timing",
        "feeding",
        "doctor",
        "infer",
        "checkpoint",
        "training",
    },
    "cli": {
        "errors",
        "files",
        "schedule",
        "model",
        "report",
        "planning",
        "schedules",
        "catalog",
        "decide",
        "explain",
        "runtime",
        "pipeline",
        "metrics",
        "timing",
        "feeding",
        "doctor",
        "infer",
        "checkpoint",
        "training",
        "launch",
        "__init__",
    },
}


def part_of(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield node.module
            if node.module == "penstock":
                yield from (f"penstock.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_follow_the_arrows(path):
    own = part_of(path)
    for module in imports_of(path):
        if module.split(".")[0] != "penstock" or module == "penstock":
            continue
        part = module.split(".")[1]
        if not (SOURCE / part).exists() and not (SOURCE / f"{part}.py").exists():
            part = "__init__"  # a public name, as __version__
        assert part == own or part in ARROWS[own], f"{path.name} imports {module}"


def test_every_part_has_its_arrows():
    assert {part_of(path) for path in FILES} == set(ARROWS)


# data about models, which the deciding half reads
PURE = {"graph.py", "costs.py", "profile.py"}
# what runs models: it may import torch at once
RUNNING = ("runtime", "pipeline", "feeding", "doctor", "infer", "checkpoint", "faults", "training", "launch")


def imports_at_once(path):
    """Return what importing a file imports: not what its functions do, nor what is there for types only."""
    todo, found = list(ast.parse(path.read_text()).body), set()
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo += ast.iter_child_nodes(node)
    return found


def needs_torch(path):
    return any(module.split(".")[0] in ("torch", "transformers") for module in imports_of(path))


def test_torch_is_imported_where_models_are_and_in_functions_that_need_it():
    for path in filter(needs_torch, FILES):
        if part_of(path) == "model":
            assert path.name not in PURE, path
        elif part_of(path) not in RUNNING:
            assert part_of(path) in ("explain", "decide", "cli", "metrics", "timing"), path
            assert not {module for module in imports_at_once(path) if module.split(".")[0] in ("torch", "transformers")}


def test_nothing_that_needs_torch_is_imported_at_once_by_what_does_not():
    """What `import penstock` and the command's help load never leads to torch."""
    names = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in FILES}
    heavy = {name for name, path in names.items() if any(m.split(".")[0] == "torch" for m in imports_at_once(path))}
    for name, path in names.items():
        if part_of(path) not in ("model", *RUNNING) or path.name in PURE:
            assert not imports_at_once(path) & heavy, name


def test_torch_stays_out_until_it_is_needed():
    code = "import sys, penstock, penstock.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys\nfrom penstock.cli.main import app\n"
    for words in ("['--help']", "['profile', '--help']"):
        code += f"try: app({words})\nexcept SystemExit as end: assert not end.code\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_only_the_worker_imports_the_solver():
    for path in FILES:
        for module in imports_of(path):
            assert module.split(".")[0] != "ortools" or path.name == "exact_worker.py", path


def test_no_file_is_out_of_hand():
    """STYLE: about 400 lines is advice. Far beyond it a file holds two thoughts."""
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 600}
    assert not long
    pages = {p.name: n for p in (SOURCE / "report" / "page").iterdir() if (n := len(p.read_text().splitlines())) > 600}
    assert not pages


def test_every_file_says_its_purpose_in_its_first_line():
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def documented(heading):
    text = (ROOT / "docs" / "api.md").read_text()
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1]
    return set(re.findall(r"^- `(\w+)`", section, re.M))


@pytest.mark.parametrize("module", [penstock, penstock.schedules, penstock.errors], ids=lambda m: m.__name__)
def test_public_names_are_the_documented_ones(module):
    assert set(module.__all__) == documented(module.__name__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_errors_are_drawn_as_they_are():
    tree = penstock.errors.__doc__
    for name in penstock.errors.__all__:
        assert name in tree
        assert issubclass(getattr(penstock.errors, name), penstock.errors.PenstockError)


BANNED = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_nothing_unpickles_or_evaluates_what_it_reads(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in BANNED
    assert not {module.split(".")[0] for module in imports_of(path)} & {"pickle", "marshal", "shelve", "yaml"}


def test_every_schedule_of_the_catalog_has_a_file_of_its_own_or_its_family():
    from penstock.catalog import CATALOG

    files = {Path(entry.builder.__code__.co_filename).name for entry in CATALOG}
    assert len(files) >= 11
    for entry in CATALOG:
        path = Path(entry.builder.__code__.co_filename)
        assert len(path.read_text().splitlines()) <= 150, path
        assert entry.name in ast.get_docstring(ast.parse(path.read_text())).splitlines()[0], path


def test_every_dependency_has_its_reason():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    needed = [line for line in lines if re.match(r'\s+"[a-z-]+[>=]', line)]
    assert len(needed) > 10
    assert all("#" in line for line in needed), [line for line in needed if "#" not in line]


def test_torch_is_pinned_for_set_up():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().split()
