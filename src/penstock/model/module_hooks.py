"""Module hooks: the modules that have hooks, and which of these hooks belong to the model's own library."""

from __future__ import annotations

import sys

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_in(model: nn.Module) -> str:
    """Return a text that names a module with hooks of the user, which a trace would drop; empty if there is none."""
    for name, module in model.named_modules():
        for kind in HOOKS:
            if any(not is_of_library(hook, module) for hook in (getattr(module, kind, None) or {}).values()):
                return f"hooks on {name or 'the model'}, which only the model's own forward calls"
    return ""


def is_of_library(hook: object, module: nn.Module) -> bool:
    """Return whether the library that defines a module has set a hook; such a hook is part of the model."""
    package = type(module).__module__.partition(".")[0]
    is_installed = "-packages" in (getattr(sys.modules.get(package), "__file__", None) or "")
    return is_installed and str(getattr(hook, "__module__", "")).partition(".")[0] == package
