"""benchmarks/published, for the tests: the same rows, costs and measure as the benchmark prints."""

import importlib.util
from pathlib import Path

_PATH = Path(__file__).parent.parent / "benchmarks" / "published" / "run.py"
_SPEC = importlib.util.spec_from_file_location("published_run", _PATH)
_RUN = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_RUN)

read_rows, costs_of, measure = _RUN.read_rows, _RUN.costs_of, _RUN.measure
