"""Golden grids: every schedule at a readable size, as text. A change of order shows up here as a diff to read.

To accept a change: delete the file and run the test; it writes the new one and fails once.
"""

from pathlib import Path

import pytest

from cases import NAMES
from penstock import schedules
from penstock.schedule.lower import lower

GOLDEN = Path(__file__).parent.parent / "golden"


def compare(name, text):
    path = GOLDEN / f"{name}.txt"
    if not path.exists():
        path.write_text(text + "\n")
        pytest.fail(f"wrote {path.name}: read it, and run the test again")
    assert text + "\n" == path.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_schedule(name):
    compare(name, str(schedules.build(name, lanes=4, micro_batches=8)))


def test_lowered():
    schedule = schedules.build("1f1b", lanes=3, micro_batches=3)
    lowered = lower(schedule, skips=[(0, 2)], keep=["recompute", "offload", "hold"])
    compare("lowered", "\n".join(" ".join(lane) for lane in lowered.lane_texts(slots=True)))
