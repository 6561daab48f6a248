"""Cluster: the speed of each device that lanes run on, and the links between lanes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CostError


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Link:
    """A connection: its latency, its bandwidth, and the links that share it.

    Attributes:
        latency_seconds: time from sending the last byte until the receiver sees the value.
        bytes_per_second: bandwidth; a link sends one value after the other.
        shared_as: links with the same name are one wire, and their values queue for it.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf
    shared_as: str | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.latency_seconds) or not 0 <= self.latency_seconds < math.inf:
            raise CostError(f"latency_seconds: {self.latency_seconds!r} must be a finite number, 0 or more")
        if not _is_number(self.bytes_per_second) or not self.bytes_per_second > 0:
            raise CostError(f"bytes_per_second: {self.bytes_per_second!r} must be a number above 0")
        if self.shared_as is not None and not (isinstance(self.shared_as, str) and self.shared_as):
            raise CostError(f"shared_as: {self.shared_as!r} must be a name, or None")


@dataclass(frozen=True)
class Cluster:
    """The devices and links that the lanes of a schedule run on.

    >>> Cluster(speed=[1.0, 0.5]).speeds(2)
    array([1. , 0.5])

    Attributes:
        speed: speed of the device of each lane; at 2.0 a stage takes half of its cost.
        link: the link between any two lanes that `links` does not contain.
        links: exceptions, by (from lane, to lane).
        host_link: the link between each lane and its host memory, for offload and fetch; one per direction.
        action_seconds: time that the runtime adds to each action, independent of the speed of the device.
    """

    speed: float | Sequence[float] = 1.0
    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    host_link: Link = Link()
    action_seconds: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.speed, np.ndarray):
            object.__setattr__(self, "speed", self.speed.tolist())
        for number in self.speed if isinstance(self.speed, Sequence) else [self.speed]:
            if not _is_number(number) or not 0 < number < math.inf:
                raise CostError(f"speed: {number!r} must be a finite number above 0")
        if not isinstance(self.links, Mapping):
            raise CostError(f"links: pass a Link for each (from lane, to lane); given: {self.links!r}")
        for pair, link in self.links.items():
            is_pair = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(lane, Integral) for lane in pair)
            if not is_pair or not isinstance(link, Link):
                raise CostError(f"links: pass a Link for each (from lane, to lane); given: {pair!r}: {link!r}")
        if not isinstance(self.link, Link) or not isinstance(self.host_link, Link):
            raise CostError("link and host_link: pass a Link")
        if not _is_number(self.action_seconds) or not 0 <= self.action_seconds < math.inf:
            raise CostError(f"action_seconds: {self.action_seconds!r} must be a finite number, 0 or more")

    def speeds(self, num_lanes: int) -> NDArray[np.float64]:
        """Return one speed per lane."""
        if isinstance(self.speed, Sequence) and len(self.speed) != num_lanes:
            raise CostError(f"speed must be one number, or one per lane; lanes: {num_lanes}, given: {len(self.speed)}")
        unknown = sorted({lane for pair in self.links for lane in pair if not 0 <= lane < num_lanes})
        if unknown:
            raise CostError(f"links name lanes that do not exist: {unknown}; lanes: {num_lanes}")
        return np.array(np.broadcast_to(np.asarray(self.speed, dtype=np.float64), num_lanes))

    def between(self, source: int, target: int) -> Link:
        """Return the link from one lane to another."""
        return self.links.get((source, target), self.link)

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON; an unlimited bandwidth is null."""
        return {
            "speed": self.speed if isinstance(self.speed, (int, float)) else list(self.speed),
            "link": _plain(self.link),
            "links": [[source, target, _plain(link)] for (source, target), link in self.links.items()],
            "host_link": _plain(self.host_link),
            "action_seconds": self.action_seconds,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Cluster:
        """Return the cluster that `to_plain` wrote.

        >>> cluster = Cluster(links={(0, 1): Link(1e-6, 1e9)})
        >>> Cluster.from_plain(cluster.to_plain()) == cluster
        True
        """
        return cls(
            speed=plain["speed"],
            link=_link(plain["link"]),
            links={(source, target): _link(link) for source, target, link in plain["links"]},
            host_link=_link(plain["host_link"]),
            action_seconds=plain["action_seconds"],
        )


def _plain(link: Link) -> list[Any]:
    bandwidth = link.bytes_per_second
    return [link.latency_seconds, None if math.isinf(bandwidth) else bandwidth, link.shared_as]


def _link(plain: Sequence[Any]) -> Link:
    latency, bandwidth, shared_as = plain
    return Link(latency, math.inf if bandwidth is None else bandwidth, shared_as)
