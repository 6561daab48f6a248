"""The README and the docs are true: their commands and their Python run, their links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


def named(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=named)
def test_commands_run(page, tmp_path, monkeypatch):
    """Every `penstock` line of a page, in order, in one folder; `make` lines must name targets that exist."""
    monkeypatch.chdir(tmp_path)
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", makefile, re.M), line
            elif words[0] == "penstock":
                result = CliRunner().invoke(app, words[1:])
                assert result.exit_code == 0, (line, result.output, result.exception)
            else:
                assert words[0] in ("python", ".venv/bin/python"), line
                assert (ROOT / words[1]).is_file(), line


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=named)
def test_python_runs(page, tmp_path):
    for block in blocks(page, "python"):
        run = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        expected = "\n".join(re.findall(r"^# (\d+[FBI]\d.*)$", block, re.M))
        assert expected in run.stdout


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readme_has_the_two_commands_and_ci_runs_one():
    commands = "\n".join(blocks(ROOT / "README.md", "bash"))
    assert "make demo" in commands
    assert "make test" in commands
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_docs_name_every_schedule():
    from penstock.catalog import CATALOG

    text = (ROOT / "docs" / "schedules.md").read_text()
    assert all(f"`{entry.name}`" in text for entry in CATALOG)
    assert "`auto`" in text
