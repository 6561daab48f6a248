"""The README and the docs are true: their commands and their Python run, their links lead somewhere."""

import ast
import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from code_blocks import run_block
from penstock.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


CHINESE = ROOT / "README.zh.md"  # its code is that of README.md, which a test says
SOURCE = ROOT / "src" / "penstock"


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


def named(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if page != CHINESE and blocks(page, "bash")], ids=named)
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


@pytest.mark.parametrize("page", [page for page in PAGES if page != CHINESE and blocks(page, "python")], ids=named)
def test_python_runs(page, tmp_path):
    for block in blocks(page, "python"):
        code, printed = run_block(block, tmp_path)
        assert code == 0, printed
        expected = "\n".join(re.findall(r"^# (\d+[FBI]\d.*)$", block, re.M))
        assert expected in printed


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


def outline(path):
    """Return the levels of a page's headings, its code, how many rows its tables have, and where its links lead."""
    text = path.read_text()
    code = re.findall(r"^```.*?^```", text, re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", prose, re.M)]
    links = sorted(target for target in re.findall(r"\]\(([^)]+)\)", prose) if not target.startswith("README"))
    return levels, code, prose.count("\n|"), prose.count("\n- "), links


def test_the_chinese_readme_says_what_the_english_one_says():
    english = ROOT / "README.md"
    assert outline(CHINESE) == outline(english)
    assert "](README.zh.md)" in english.read_text()
    assert "](README.md)" in CHINESE.read_text()
    figures = [sorted(re.findall(r"\d+\.\d+", path.read_text())) for path in (english, CHINESE)]
    assert figures[0] == figures[1]


def messages():
    """Return every text of the source, with … for what is put in."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_troubleshooting_quotes_messages_that_exist():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### (.+)$", text, re.M)
    assert len(quoted) > 40
    assert len(quoted) == len(set(quoted))
    known = set(messages())
    for heading in quoted:
        assert re.fullmatch(r"`[^`]+`", heading), heading
        words = heading.strip("`").removesuffix("…")
        assert any(words in message for message in known), heading


def test_the_pictures_are_what_the_simulator_says_today():
    drawn = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))
    for name, made in drawn["PICTURES"].items():
        path = ROOT / "docs" / "images" / f"{name}.svg"
        assert path.read_text() == drawn["draw"](made()), f"{name}: run scripts/make_images concepts"
