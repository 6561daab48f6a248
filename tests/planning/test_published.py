"""The simulator meets published tables that it was not tuned to; the searched schedules are at or below them."""

import pytest

from penstock import schedules, simulate
from published import costs_of, measure, read_rows

TABLE_5, TABLE_8 = read_rows("table5"), read_rows("table8")


def name_of(row):
    return f"{row['lanes']}x{row['micro_batches']}-{row['F']}"


@pytest.mark.parametrize("row", TABLE_5 + TABLE_8, ids=name_of)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
def test_handmade_schedules_have_the_published_bubble_to_four_decimals(row, name):
    assert f"{measure(name, row)[0]:.4f}" == row[name]


def test_interleaved_has_the_corrected_bubble():
    """The paper prints 0.1055: its script drops a dependency where a micro-batch wraps around to the first lane."""
    schedule = schedules.build("interleaved_1f1b", lanes=8, micro_batches=24, stages_per_lane=3)
    assert round(simulate(schedule, costs_of(TABLE_5[0], 3)).span_bubble, 4) == 0.1090


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE_5[:8], ids=name_of)
@pytest.mark.parametrize(("name", "units"), [("zb_1p", 1), ("zb_2p", 2)])
def test_searched_schedules_are_at_or_below_the_published_bubble_at_the_same_memory(row, name, units):
    bubble, peak, _ = measure(name, row)
    assert round(bubble, 4) <= float(row[name])
    assert peak <= units * int(row["lanes"]) * (1 + 1e-9)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE_8[:4], ids=name_of)
def test_zb_v_is_at_or_below_the_published_bubble_at_the_same_memory(row):
    bubble, peak, _ = measure("zb_v", row)
    assert round(bubble, 4) <= float(row["zb_v"])
    assert peak <= int(row["lanes"]) * (1 + 1e-9)
