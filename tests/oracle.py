"""A second opinion: the rules of pipelines written once more, slowly, without tables or arrays."""

from __future__ import annotations

from penstock.schedule.actions import Kind


def run_slowly(schedule, seconds, *, lag=0.0, skips=()):
    """Return {action: (start, end)} of a schedule, or None if it cannot run to its end.

    `seconds(kind, stage)` is how long an action takes; a value needs `lag` to reach another lane.
    """
    last = schedule.num_stages - 1
    ends: dict = {}
    spans: dict = {}
    next_at = [0] * schedule.num_lanes
    free = [0.0] * schedule.num_lanes

    def arrival(maker, lane):
        if maker not in ends:
            return None
        end, where = ends[maker]
        return end if where == lane else end + lag

    def backward_of(stage, mb, lane):
        """When the gradient that a stage's backward makes is there."""
        found = [t for kind in "BI" if (t := arrival((kind, stage, mb), lane)) is not None]
        return min(found) if found else None

    def needs(action, lane):
        kind, s, m = action
        if kind is Kind.F:
            sources = ([s - 1] if s else []) + [a for a, b in skips if b == s and a != s - 1]
            return [arrival(("F", a, m), lane) for a in sources]
        if kind in (Kind.B, Kind.I):
            targets = ([s + 1] if s < last else []) + [b for a, b in skips if a == s and b != s + 1]
            return [arrival(("F", s, m), lane)] + [backward_of(b, m, lane) for b in targets]
        if kind is Kind.W:
            return [arrival(("I", s, m), lane)]
        return [min((t for k in "BW" if (t := arrival((k, s, m), lane)) is not None), default=None)]

    moved = True
    while moved:
        moved = False
        for lane, actions in enumerate(schedule.lanes):
            while next_at[lane] < len(actions):
                action = actions[next_at[lane]]
                times = needs(action, lane)
                if any(t is None for t in times):
                    break
                start = max([free[lane], *times])
                end = start + seconds(action.kind, action.stage)
                free[lane] = end
                spans[action] = (start, end)
                ends[str(action.kind), action.stage, action.mb] = (end, lane)
                next_at[lane] += 1
                moved = True
    return spans if next_at == [len(lane) for lane in schedule.lanes] else None


def is_complete(schedule):
    """Is every action that a step needs there exactly once, on its own lane?"""
    seen: dict = {}
    for lane, actions in enumerate(schedule.lanes):
        for action in actions:
            if action.stage >= schedule.num_stages or action.mb >= schedule.num_mbs:
                return False
            if action in seen or schedule.home(action.stage, action.mb) != lane:
                return False
            seen[action] = lane
    for stage in range(schedule.num_stages):
        for mb in range(schedule.num_mbs):
            kinds = {str(a.kind) for a in seen if (a.stage, a.mb) == (stage, mb)} - {"U"}
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                return False
    return True
