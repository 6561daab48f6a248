"""What the rules for small configs cannot know: per model type, attributes, the class to build, entries of its batch."""

from __future__ import annotations

from typing import Any

__all__ = ["SMALL"]

SMALL: dict[str, dict[str, Any]] = {}
