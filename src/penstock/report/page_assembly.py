"""Page assembly: build a self-contained page, which needs no network, from a template, styles, scripts and data."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources

# Inside a script element, these characters in JSON could end the element, start a tag or end a line.
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}

Json = Mapping[str, object]


def assemble(template: str, *, title: str, styles: Iterable[str], scripts: Iterable[str], data: Json) -> str:
    """Return a page as text; template, styles and scripts (without .js) are names of files in the folder `page`."""
    script = "\n".join(['"use strict";', "(() => {", *(_read(f"{name}.js") for name in scripts), "})();"])
    style = "\n".join(map(_read, styles))
    parts = {
        "policy": _policy(script, style),
        "title": html.escape(_printable(title)),
        "style": style,
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPES),
        "script": script,
    }
    # a single pass over the template: markers inside inserted texts stay as they are
    return re.sub(r"\{\{(\w+)\}\}", lambda marker: parts[marker[1]], _read(template))


def _read(name: str) -> str:
    return resources.files("penstock.report").joinpath("page", name).read_text(encoding="utf-8")


def _printable(text: str) -> str:
    """Replace lone surrogates, which a file cannot contain."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _policy(script: str, style: str) -> str:
    """Return the content security policy of the page: its own script and style (by hash), and no network."""
    return (
        f"default-src 'none'; script-src {_hash_source(script)}; style-src {_hash_source(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
