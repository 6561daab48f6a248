"""The site is built from the docs, strictly and offline, and its links lead somewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The links, the places that links can lead to, and what a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.links, self.places, self.fetched = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.places |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon"):
            self.fetched.append(given["href"])
        if "src" in given:
            self.fetched.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory, worker_id):
    """Return the folder of the built site, which all workers of a session share."""
    folder = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent
    folder /= "site"
    with FileLock(f"{folder}.lock"):
        if not (folder / "site").exists():
            build(folder)
    return folder / "site"


def build(folder):
    """Build the site; a warning is an error, as with `make docs`."""
    options = ["-q", "-W", "-n", "--keep-going", "-d", folder / "doctrees", "-c", ROOT / "docs", ROOT, folder / "site"]
    command = [sys.executable, "-m", "sphinx", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def pages(site):
    found = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(found) > 40
    return found


def test_nothing_is_fetched_from_elsewhere(site, pages):
    for path, page in pages.items():
        for address in page.fetched:
            parts = urlsplit(address)
            assert not parts.scheme or parts.scheme == "data", (path, address)
            assert not parts.netloc, (path, address)
            assert parts.scheme or (path.parent / unquote(parts.path)).is_file(), (path, address)
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style


def test_links_lead_to_pages_and_to_places_in_them(pages):
    for path, page in pages.items():
        for address in page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert goal.is_file(), (path, address)
            if parts.fragment and goal in pages:
                assert unquote(parts.fragment) in pages[goal].places, (path, address)


def test_every_page_of_the_docs_is_in_the_menu(site, pages):
    front = site / "docs" / "index.html"
    reached = {(front.parent / urlsplit(link).path).resolve() for link in pages[front].links}
    for source in (ROOT / "docs").rglob("*.md"):
        assert (site / source.relative_to(ROOT)).with_suffix(".html") in {front, *reached}, source


def test_the_reference_has_every_public_name(site):
    import penstock

    text = (site / "docs" / "reference" / "penstock.html").read_text()
    for name in penstock.__all__:
        if not hasattr(getattr(penstock, name), "__path__") and name not in ("errors", "schedules", "timing"):
            assert f'id="penstock.{name}"' in text, name
