"""Faults: inject faults for tests, and locate the cause of real ones."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.faults.injector import Injector
    from penstock.faults.nonfinite import locate
    from penstock.faults.out_of_memory import advice, is_out_of_memory
    from penstock.faults.straggler import slow_lanes

__all__ = ["Injector", "advice", "is_out_of_memory", "locate", "slow_lanes"]

_HOME_OF = {
    "Injector": "injector",
    "advice": "out_of_memory",
    "is_out_of_memory": "out_of_memory",
    "locate": "nonfinite",
    "slow_lanes": "straggler",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class or a function
    """Import modules that need torch on first use: processes start to watch their parent before they load torch."""
    if name in _HOME_OF:
        return getattr(import_module(f"penstock.faults.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'penstock.faults' has no attribute {name!r}")
