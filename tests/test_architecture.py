"""What holds the project together: who imports whom, public names, file sizes, and words that must not be there."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
FILES = sorted(SOURCE.rglob("*.py"))

# Who may import whom, beside `errors`, which everything may: each folder after those that it imports. Imports that are
# there for types alone do not count. `python tests/test_architecture.py` writes the same list into CONTRIBUTING.md.
ARROWS = {
    "_version": "",
    "errors": "",
    "files": "",
    "torchrun": "",
    "devices": "",
    "metrics": "devices",
    "model/small_models": "",
    "randomness": "",
    "compile": "devices randomness",
    "model": "compile devices files",
    "tensor_files": "",
    "loading": "model tensor_files",
    "model/capture/export": "compile devices model randomness",
    "model/capture/replay": "compile model model/capture/export randomness",
    "model/capture": "compile model model/capture/export model/capture/replay randomness",
    "model/profiling": "devices model",
    "infer/graph": "compile devices model model/capture model/capture/export model/profiling",
    "runtime/backward": "compile",
    "runtime/keep": "compile devices model model/profiling",
    "schedule": "files",
    "report": "files schedule",
    "planning": "model report schedule",
    "planning/partition": "model planning report schedule",
    "planning/explain": "files model planning planning/partition report schedule",
    "planning/search": "model planning schedule",
    "runtime/wire": "devices schedule torchrun",
    "runtime": "devices model randomness runtime/backward runtime/keep runtime/wire schedule",
    "infer/stream": "devices infer/graph model runtime",
    "pipeline/splitting": "model runtime",
    "pipeline/exactness": "devices model pipeline/splitting runtime",
    "runtime/graphs": "devices model runtime schedule",
    "runtime/lanes": "devices model runtime runtime/wire schedule",
    "schedule/builders": "schedule",
    "planning/builders": "model planning planning/search schedule schedule/builders",
    "catalog": "planning/builders schedule schedule/builders",
    "schedules": "catalog model planning planning/search schedule schedule/builders",
    "deciding": (
        "files model model/capture model/profiling model/small_models planning planning/explain "
        "planning/partition report schedule schedules"
    ),
    "faults": "model model/profiling planning planning/partition report runtime schedule schedules",
    "launch/config": "deciding report schedule schedules torchrun",
    "pipeline/planned": (
        "_version deciding devices model model/capture pipeline/exactness pipeline/splitting "
        "planning/partition runtime/keep runtime/lanes schedule schedules"
    ),
    "pipeline": (
        "compile deciding devices loading model model/capture pipeline/exactness pipeline/planned "
        "pipeline/splitting planning report runtime runtime/backward runtime/graphs runtime/keep "
        "runtime/lanes schedule"
    ),
    "checkpoint": "_version devices pipeline schedule tensor_files",
    "checkpoint/formats": "checkpoint tensor_files",
    "infer/generation": "loading pipeline planning report runtime/lanes runtime/wire",
    "infer": "infer/generation infer/graph infer/stream",
    "feeding": "devices model pipeline pipeline/planned",
    "timing": "devices model/profiling",
    "doctor": "devices feeding report timing",
    "training/callbacks": "devices faults pipeline torchrun",
    "training/resume": "feeding tensor_files torchrun",
    "training/view": "faults report training/callbacks",
    "training": (
        "checkpoint deciding devices faults feeding pipeline pipeline/planned runtime/lanes torchrun "
        "training/callbacks training/resume training/view"
    ),
    "integrations": "checkpoint pipeline runtime",
    "__init__": (
        "_version checkpoint deciding feeding loading metrics model pipeline pipeline/planned planning report "
        "schedules training"
    ),
    "launch/build": (
        "_version compile deciding devices launch/config model model/small_models pipeline "
        "pipeline/planned runtime/lanes schedules training training/callbacks"
    ),
    "launch/processes": (
        "faults launch/build launch/config model/capture runtime/lanes runtime/wire torchrun training/resume "
        "training/view"
    ),
    "cli": (
        "__init__ _version checkpoint checkpoint/formats deciding devices doctor files launch/build "
        "launch/config launch/processes model model/small_models pipeline pipeline/planned planning "
        "report schedule schedules tensor_files training/callbacks training/view"
    ),
    "__main__": "cli",
    "launch": "launch/processes",
}


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def part_of(path):
    relative = path.relative_to(SOURCE)
    return "/".join(relative.parts[:-1]) or relative.stem


@cache
def file_of(module):
    """Return the file of a module of ours, or of the module that a name is in."""
    path = ROOT / "src" / Path(*module.split("."))
    while path != ROOT / "src":
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.exists():
                return found
        path = path.parent
    return None


def is_for_types(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(path, *, with_types=True):
    todo = [tree_of(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield node.module
            if node.module.split(".")[0] == "penstock":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif is_for_types(node) and not with_types:
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)


def imported_parts(path):
    """Yield the folders that a file imports at run time, with the module that it names."""
    own = part_of(path)
    for module in imports_of(path, with_types=False):
        if module.split(".")[0] != "penstock" or module == "penstock":
            continue
        part = part_of(file_of(module))
        if part == "__init__" or (part != own and file_of(module).name == "__init__.py" and module.count(".") > 1):
            continue  # a folder, from which a name of one of its files is taken: that name is checked on its own
        if part not in (own, "errors"):
            yield part, module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_follow_the_arrows(path):
    for part, module in imported_parts(path):
        assert part in ARROWS[part_of(path)].split(), f"{path.name} imports {module}"


def test_no_arrow_is_unused():
    used = {(part_of(path), part) for path in FILES for part, _ in imported_parts(path)}
    drawn_arrows = {(part, other) for part, others in ARROWS.items() for other in others.split()}
    assert drawn_arrows - used == {("cli", "__init__")}  # `import penstock` itself


def test_every_folder_has_its_arrows():
    assert {part_of(path) for path in FILES} == set(ARROWS)


def test_no_folder_imports_one_that_comes_after_it():
    seen = set()
    for part, others in ARROWS.items():
        assert set(others.split()) <= seen, f"{part} imports {set(others.split()) - seen}"
        seen.add(part)


def drawn():
    """Return the list of folders as CONTRIBUTING.md shows it: what each is for, and what it imports."""
    lines = []
    for part, others in ARROWS.items():
        path = SOURCE / part / "__init__.py" if (SOURCE / part).is_dir() else SOURCE / f"{part}.py"
        purpose = ast.get_docstring(tree_of(path)).splitlines()[0]
        lines.append(f"- `{part}` {purpose}" + (f" Imports {', '.join(others.split())}." if others else ""))
    return "\n".join(lines)


MARKS = "<!-- arrows: written by tests/test_architecture.py -->\n", "<!-- end of arrows -->"


def test_contributing_shows_the_arrows():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert text.split(MARKS[0])[1].split(MARKS[1])[0].strip() == drawn()


def test_no_folder_is_crowded():
    for folder in {path.parent for path in FILES}:
        assert len(list(folder.glob("*.py"))) <= 17, folder


def test_the_page_of_the_architecture_has_a_row_for_every_folder():
    page = (ROOT / "docs" / "design" / "architecture.md").read_text()
    table = re.search(r"^## The folders\n(.*?)(?=^## )", page, re.M | re.S)[1]
    listed = {name for row in re.findall(r"^\| (`.*?`) \|", table, re.M) for name in re.findall(r"`(.*?)`", row)}
    folders = {path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.is_dir() and path.name != "__pycache__"}
    assert {name for name in listed if not name.endswith(".py")} == set(map(str, folders))
    assert all((SOURCE / name).exists() for name in listed)


def test_file_names_are_unique():
    names = [path.name for path in FILES if path.name != "__init__.py" and part_of(path) not in ("cli", "launch")]
    assert {name for name in names if names.count(name) > 1} == set()


# data about models, which the deciding half reads
PURE = {"graph.py", "costs.py", "profile.py"}
# what runs models: it may import torch at once
RUNNING = (
    "compile", "devices", "randomness", "runtime", "pipeline", "feeding", "doctor", "infer", "checkpoint", "faults",
    "training", "launch", "loading", "tensor_files", "integrations",
)  # fmt: skip


def top_of(path):
    return part_of(path).split("/")[0]


def imports_at_once(path):
    """Return what importing a file imports: not what its functions do, nor what is there for types only."""
    todo, found = list(tree_of(path).body), set()
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif is_for_types(node):
            todo += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo += ast.iter_child_nodes(node)
    return found


def needs_torch(path):
    return any(module.split(".")[0] in ("torch", "transformers") for module in imports_of(path))


def test_torch_is_imported_where_models_are_and_in_functions_that_need_it():
    for path in filter(needs_torch, FILES):
        if top_of(path) == "model":
            assert path.name not in PURE, path
        elif top_of(path) not in RUNNING:
            assert top_of(path) in ("deciding", "cli", "metrics", "timing"), path
            assert not {module for module in imports_at_once(path) if module.split(".")[0] in ("torch", "transformers")}


def test_nothing_that_needs_torch_is_imported_at_once_by_what_does_not():
    """What `import penstock` and the command's help load never leads to torch."""
    names = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in FILES}
    heavy = {name for name, path in names.items() if any(m.split(".")[0] == "torch" for m in imports_at_once(path))}
    for name, path in names.items():
        if top_of(path) not in ("model", *RUNNING) or path.name in PURE:
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


def test_only_devices_uses_torch_cuda():
    """What a device can do has one home. Doctests of scripts that use CUDA, as users write them, are no exception."""
    for path in FILES:
        if top_of(path) != "devices":
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    assert (node.value.id, node.attr) != ("torch", "cuda"), f"{path}:{node.lineno}"
            assert not any(name.startswith("torch.cuda") for name in imports_of(path)), path


def test_every_lane_has_streams():
    """Nothing in the runtime asks whether there are streams: a lane on a CPU has `HostStreams`."""
    asks = re.compile(r"\bstreams? is (not )?None")
    for path in FILES:
        if top_of(path) in ("runtime", "pipeline"):
            assert not asks.search(path.read_text()), path


PRIVATE = re.compile(r"\b_?pipe(?:line)?\._[a-z]")


def test_nobody_outside_of_pipeline_reads_its_private_attributes():
    """`pipe.internals` is what others may use of a pipeline's inside."""
    for path in FILES:
        if top_of(path) not in ("pipeline", "infer"):
            found = [line for line in path.read_text().splitlines() if PRIVATE.search(line)]
            assert not found, f"{path}: {found}"


def test_every_file_says_its_purpose_in_its_first_line():
    for path in FILES:
        assert ast.get_docstring(tree_of(path)), path


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
    for node in ast.walk(tree_of(path)):
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
        assert entry.name in ast.get_docstring(tree_of(path)).splitlines()[0], path


def test_every_dependency_has_its_reason():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    needed = [line for line in lines if re.match(r'\s+"[a-z-]+[>=]', line)]
    assert len(needed) > 10
    assert all("#" in line for line in needed), [line for line in needed if "#" not in line]


def test_torch_is_pinned_for_set_up():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().split()


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    before, _, rest = page.read_text().partition(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n{drawn()}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
