"""Group choice: how many groups are in flight, chosen from measured times.

The best number depends on the model and the machine. If a larger batch takes hardly longer, one group is best: the
lanes then take turns. Otherwise as many groups as lanes are best. So each number runs for a few rounds, and the fastest
one stays. A round is one token of each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_ROUNDS = 2  # measured rounds of each number; the first round after a change does not count


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
    _seconds: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # (size class, groups) -> rounds
    _is_first: bool = True

    def note(self, num_requests: int, num_groups: int, seconds: float) -> None:
        """Note the time of a round, in which no request joined or left."""
        if self._is_first:
            self._is_first = False
            return
        self._seconds.setdefault((num_requests.bit_length(), num_groups), []).append(seconds)

    def restart(self) -> None:
        """Ignore the next round, because the groups have changed."""
        self._is_first = True

    def best(self, num_requests: int) -> int:
        """Return the number of groups to use now: one that must still be measured, or the fastest."""
        tried = candidates(self.num_lanes, num_requests)
        for num_groups in tried:
            if len(self._rounds(num_requests, num_groups)) < _ROUNDS:
                return num_groups
        return min(tried, key=lambda num_groups: min(self._rounds(num_requests, num_groups)))

    def _rounds(self, num_requests: int, num_groups: int) -> Sequence[float]:
        return self._seconds.get((num_requests.bit_length(), num_groups), ())
