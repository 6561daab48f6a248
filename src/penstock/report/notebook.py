"""Notebook: pages and texts as HTML for the output of a cell."""

from __future__ import annotations

import html


def in_frame(page: str, *, height: int) -> str:
    """Return a page in a frame that can run its script and reach nothing else.

    >>> in_frame('<p title="a">', height=90)[:52]
    '<iframe sandbox="allow-scripts" style="width: 100%; '
    """
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(page)}"></iframe>'


def as_text(text: object) -> str:
    """Return a text with its line breaks.

    >>> as_text("a < b")
    '<pre>a &lt; b</pre>'
    """
    return f"<pre>{html.escape(str(text))}</pre>"
