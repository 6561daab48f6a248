"""Catalog: the schedules of Penstock, one entry each. A new schedule needs a builder and an entry here."""

from __future__ import annotations

from penstock.planning.builders.hanayo import hanayo
from penstock.planning.builders.v_shapes import v_half, v_min, zb_v
from penstock.planning.builders.zb_limited import zb_1p, zb_2p
from penstock.schedule.builders.chimera import chimera
from penstock.schedule.builders.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.builders.gpipe import gpipe, zb_gpipe
from penstock.schedule.builders.interleaved import interleaved_1f1b
from penstock.schedule.builders.looped_bfs import looped_bfs
from penstock.schedule.builders.one_f_one_b import build_1f1b
from penstock.schedule.builders.pipedream import pipedream, pipedream_2bw
from penstock.schedule.builders.zero_bubble import zb_h1, zb_h2
from penstock.schedule.registry import Entry

_2BW = "Narayanan et al. 2021 (PipeDream-2BW)"
_MEGATRON = "Narayanan et al. 2021 (Megatron-LM)"
_ZERO_BUBBLE = "Qi et al. 2024 (Zero Bubble)"
_MEMORY = "Qi et al. 2024 (Controllable Memory)"

CATALOG: tuple[Entry, ...] = (
    Entry("gpipe", gpipe, "all forwards, then all backwards", "Huang et al. 2019", 1),
    Entry("zb_gpipe", zb_gpipe, "gpipe that sends input gradients first; for a loss over the whole batch", "", 1),
    Entry("1f1b", build_1f1b, "one forward, one backward in turn; memory grows with lanes, not micro-batches", _2BW, 1),
    Entry("interleaved_1f1b", interleaved_1f1b, "1f1b with several stages per lane: smaller bubble", _MEGATRON),
    Entry("looped_bfs", looped_bfs, "all micro-batches through one stage, then the lane's next", "Lamy-Poirier 2023"),
    Entry("zb_h1", zb_h1, "1f1b with weight gradients moved into the bubble, in the same memory", _ZERO_BUBBLE, 1),
    Entry("zb_h2", zb_h2, "twice the warm-up of zb_h1: almost no bubble, twice the memory", _ZERO_BUBBLE, 1),
    Entry("zb_1p", zb_1p, "searched for the given costs, within the memory of 1f1b", _ZERO_BUBBLE, 1),
    Entry("zb_2p", zb_2p, "searched for the given costs, within twice the memory of 1f1b", _ZERO_BUBBLE, 1),
    Entry("zb_v", zb_v, "two stages per lane as a V: no bubble if F = I = W, in the memory of 1f1b", _ZERO_BUBBLE, 2),
    Entry("v_half", v_half, "a V with half the memory of 1f1b", _MEMORY, 2),
    Entry("v_min", v_min, "a V with a third of the memory of 1f1b", _MEMORY, 2),
    Entry(
        "dualpipe",
        dualpipe,
        "two ways at once, forwards and backwards overlap; two copies of the weights",
        "DeepSeek-AI 2024 (DeepSeek-V3)",
        1,
        doubles_weights=True,
    ),
    Entry(
        "dualpipe_v",
        dualpipe_v,
        "dualpipe folded in the middle: one copy of the weights, two stages per lane",
        "Qi et al. 2025 (Cut-in-half DualPipe)",
        2,
    ),
    Entry(
        "chimera",
        chimera,
        "two 1f1b pipelines towards each other; two copies of the weights",
        "Li and Hoefler 2021",
        1,
        doubles_weights=True,
    ),
    Entry("hanayo", hanayo, "1f1b in waves back and forth over the lanes; one copy of the weights", "Liu et al. 2023"),
    Entry(
        "pipedream",
        pipedream,
        "asynchronous: an update after each backward, old weights are stashed",
        "Narayanan et al. 2019 (PipeDream)",
        1,
        trains_exactly=False,
    ),
    Entry(
        "pipedream_2bw",
        pipedream_2bw,
        "asynchronous: updates in groups, two versions of the weights",
        _2BW,
        1,
        trains_exactly=False,
    ),
)
