"""How the site is built from the Markdown pages: `make docs`. Nothing is fetched; every warning is an error.

The pages read as they are on any code host. What only the site can do is done here, while a page is read: the menu is
made from the lists of links of docs/index.md, and the reference from docstrings, for the names that docs/api.md lists.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import penstock

ROOT = Path(__file__).parent.parent

project = "Penstock"
author = "the authors of Penstock"
copyright = author  # noqa: A001 - Sphinx's name for it
version = release = penstock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The source folder is the repository, so that pages may link to benchmarks and examples as they do on a code host.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "benchmarks/**.md", "examples/README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "**/.*", "src", "tests", "scripts", "build", "dist", "penstock-demo"]

html_theme = "furo"
html_title = "Penstock"
html_static_path = ["_static"]
html_css_files = ["penstock.css"]
html_extra_path = ["_root"]  # index.html, which leads to docs/index.html
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2f6fde", "color-brand-content": "#2f6fde"},
    "dark_css_variables": {"color-brand-primary": "#78a6ff", "color-brand-content": "#78a6ff"},
}
pygments_style, pygments_dark_style = "friendly", "github-dark"

myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the changelog repeats headings

default_role = "code"  # docstrings quote code as Markdown does
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_type_aliases: dict[str, str] = {}
python_use_unqualified_type_names = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 88
add_module_names = False
napoleon_numpy_docstring = False
nitpicky = True
# Types in signatures: those of other packages have no pages here; of our own, those that nobody needs by name.
nitpick_ignore_regex = [("py:.*", r"(?!penstock\b).*"), ("py:class", r"penstock\.(?!schedules\b|errors\b)[a-z].*")]
# What public functions return is in the reference too, though nobody makes it by its name.
RETURNED = {
    "penstock": [
        "checkpoint.reader.Restored",
        "feeding.feed.Feed",
        "pipeline.step_recording.Recording",
        "planning.explain.explanation.Explanation",
        "report.bubble_causes.Causes",
        "report.timeline.Memory",
        "report.timeline.Span",
        "training.callbacks.callback.Reading",
        "training.callbacks.callback.Summary",
    ],
    "penstock.schedules": ["schedule.registry.Entry"],
}


def read_page(app: Any, name: str, source: list[str]) -> None:  # noqa: ANN401, ARG001 - Sphinx's own
    """Add to a page what only the site has."""
    if name == root_doc:
        source[0] += menu(source[0])
    elif name == "benchmarks/README":
        found = (ROOT / "benchmarks").glob("*/*.md")
        source[0] += contents(sorted(f"{path.parent.name}/{path.stem}" for path in found))
    elif name == "docs/api":
        source[0] = link_names(source[0])
    elif name.startswith("docs/reference/"):
        source[0] += reference("penstock" if name.endswith("/penstock") else f"penstock.{Path(name).name}")


def menu(text: str) -> str:
    """Return the menu: a section for each heading of the front page, with the pages that it links to in a list.

    Pages of a folder that are not in any list follow in the section of their folder's others.
    """
    sections = re.findall(r"^## (.+)\n((?:.|\n)*?)(?=^## |\Z)", text, re.M)
    listed = {heading: re.findall(r"^- \[.+?\]\(([^)#]+)\.md\)", body, re.M) for heading, body in sections}
    known = {page for pages in listed.values() for page in pages}
    for pages in listed.values():
        for folder in sorted({Path(page).parent for page in pages if not page.startswith("..")}):
            found = sorted((ROOT / "docs" / folder).glob("*.md"))
            pages += [page for path in found if (page := str(folder / path.stem)) not in (*known, "index")]
        known |= set(pages)
    return "".join(contents(pages, heading) for heading, pages in listed.items())


def contents(pages: list[str], caption: str = "") -> str:
    """Return a part of the menu."""
    lines = [":hidden:", *([f":caption: {caption}"] if caption else []), "", *pages]
    return "\n```{toctree}\n" + "\n".join(lines) + "\n```\n" if pages else ""


def link_names(text: str) -> str:
    """Return the list of names with a link from each name to its place in the reference."""
    module = ""
    lines = []
    for line in text.splitlines():
        if line.startswith("## "):
            module = line[3:]
        found = re.match(r"- `(\w+)`(.*)", line)
        lines.append(f"- {{py:obj}}`{found[1]} <{module}.{found[1]}>`{found[2]}" if found else line)
    return "\n".join(lines)


def reference(module: str) -> str:
    """Return what the docstrings of a module's public names say, in the order of docs/api.md."""
    text = (ROOT / "docs" / "api.md").read_text()
    section = re.search(rf"^## {re.escape(module)}\n((?:.|\n)*?)(?=^## |\Z)", text, re.M)
    names = re.findall(r"^- `(\w+)`", section[1] if section else "", re.M)
    about = f".. py:module:: {module}\n\n"
    returned = "".join(f".. autoclass:: penstock.{name}()\n\n" for name in RETURNED.get(module, ()))
    tree = f"\n```text\n{penstock.errors.__doc__}```\n" if module == "penstock.errors" else ""
    parts = [about, *(directive(module, name) for name in names)]
    if returned:
        parts += [".. rubric:: What these return\n\n", returned]
    return tree + "\n```{eval-rst}\n" + "".join(parts) + "```\n"


def directive(module: str, name: str) -> str:
    """Return the directive for one public name; a module has a page of its own."""
    thing = getattr(import_module(module), name)
    if isinstance(thing, ModuleType):
        return ""
    lines = [f".. auto{'class' if isinstance(thing, type) else 'function'}:: {module}.{name}"]
    if isinstance(thing, type) and issubclass(thing, BaseException):
        lines.append("   :show-inheritance:")
    return "\n".join(lines) + "\n\n"


def read_again(app: Any, env: Any, *changes: set[str]) -> list[str]:  # noqa: ANN401, ARG001 - Sphinx's own
    """Return the pages that depend on more than their own text."""
    gathering = (root_doc, "docs/api", "benchmarks/README")
    return [name for name in env.found_docs if name in gathering or name.startswith("docs/reference/")]


def setup(app: Any) -> None:  # noqa: ANN401 - Sphinx's own
    """Tell Sphinx what is ours."""
    app.connect("source-read", read_page)
    app.connect("env-get-outdated", read_again)
