"""Group choice: how many groups are in flight, chosen from measured times.

The best number depends on the model and the machine. If a larger batch takes hardly longer, one group is best: the
lanes then take turns, each with all threads. Otherwise as many groups as lanes are best. So each number runs for a few
rounds, and the fastest one stays. A round is one token of each request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_ROUNDS = 2  # measured rounds of each number; the first round after a change does not count
_SLOW = 1.3  # a number is tried no longer if its first round takes so much longer than a round of another number
_LEAST_ROUNDS = 24  # if fewer rounds are left, nothing new is tried


def candidates(num_lanes: int, num_requests: int) -> tuple[int, ...]:
    """Return the numbers of groups to try; the first one is the one to begin with.

    >>> candidates(2, 4), candidates(2, 1), candidates(4, 8)
    ((2, 1), (1,), (4, 5, 1))
    """
    full = min(num_lanes, num_requests)
    more = (num_lanes + 1,) if num_requests >= 2 * num_lanes and num_lanes > 2 else ()
    return tuple(dict.fromkeys((full, *more, 1)))


@dataclass
class GroupChoice:
    """Measures rounds, and says how many groups should be in flight.

    Args:
        num_lanes: the number of lanes.
    """

    num_lanes: int
    _seconds: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # (requests, groups) -> rounds
    _is_first: bool = True

    def note(self, num_requests: int, num_groups: int, seconds: float) -> None:
        """Note the time of a round, in which no request joined or left."""
        rounds = self._seconds.setdefault((num_requests, num_groups), [])
        if not self._is_first:
            rounds.append(seconds)
        elif not rounds and seconds > _SLOW * self._fastest(num_requests):
            rounds += [seconds] * _ROUNDS
        self._is_first = False

    def restart(self) -> None:
        """Ignore the next round, because the groups have changed."""
        self._is_first = True

    def best(self, num_requests: int, num_rounds_left: int) -> int | None:
        """Return the number of groups to use now: one that must still be measured, or the fastest; None if unknown."""
        tried = candidates(self.num_lanes, num_requests)
        measured = {groups: self._seconds.get((num_requests, groups), []) for groups in tried}
        if num_rounds_left >= _LEAST_ROUNDS:
            for num_groups in tried:
                if len(measured[num_groups]) < _ROUNDS:
                    return num_groups
        known = [groups for groups in tried if measured[groups]]
        return min(known, key=lambda groups: min(measured[groups])) if known else None

    def _fastest(self, num_requests: int) -> float:
        return min((min(t) for (count, _), t in self._seconds.items() if count == num_requests and t), default=1e9)
