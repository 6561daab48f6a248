"""The transformers models of this benchmark, by group, and all that can be built small."""

GROUPS: dict[str, list[str]] = {}
ALL: list[str] = []
