"""Placement: the number of lanes, the device of each, and the threads and the autocast that they use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.deciding.defaults import LANES
from penstock.devices import cuda
from penstock.devices.kinds import check_device
from penstock.errors import UsageError
from penstock.runtime.lanes.lane_group import world_size
from penstock.schedule.counts import check_count
from penstock.schedule.schedule import Schedule


def choose_lanes(lanes: int | None, devices: Sequence[object] | None, schedule: object, *, is_run: bool = True) -> int:
    """Return the number of lanes: `lanes`, or that of the processes, of the schedule, of the devices, or of the GPUs.

    Under torchrun, a plan that runs has one lane per process. With `is_run=False`, `lanes` may be any number.

    Raises:
        UsageError: if `lanes` contradicts the number of processes or the schedule.
    """
    if lanes is not None:
        check_count("lanes", lanes, 1 << 16)
    processes = world_size()
    if processes > 1 and (is_run or lanes is None):
        if lanes not in (None, processes):
            raise UsageError(f"lanes: {lanes}, but there are {processes} processes, and each is a lane; leave it out")
        return processes
    if isinstance(schedule, Schedule):
        if lanes not in (None, schedule.num_lanes):
            raise UsageError(f"lanes: {lanes}, but the schedule has {schedule.num_lanes}; leave it out")
        return schedule.num_lanes
    if lanes is not None:
        return lanes
    if devices is not None and not isinstance(devices, (str, torch.device, int)):
        return max(1, len(devices))
    return max(LANES, cuda.num_gpus())


def check_devices(devices: Sequence[torch.device | str | int] | None, num_lanes: int) -> list[torch.device]:
    """Return one device per lane.

    Raises:
        UsageError: if the number of devices is not the number of lanes, or if a device does not exist.
    """
    if devices is None:
        count = cuda.num_gpus()
        return [torch.device("cuda", lane % count) if count else torch.device("cpu") for lane in range(num_lanes)]
    listed = [devices] * num_lanes if isinstance(devices, (str, torch.device, int)) else list(devices)
    if len(listed) != num_lanes:
        raise UsageError(f"devices: pass one for each lane; devices: {len(listed)}, lanes: {num_lanes}")
    return [check_device(given, "devices") for given in listed]


def threads_per_lane(devices: Sequence[torch.device]) -> int | None:
    """Return the number of torch threads per lane if several lanes share the cores of the CPU, otherwise None."""
    on_cpu = sum(device.type == "cpu" for device in devices)
    if on_cpu < 2 or world_size() > 1:
        return None
    return share_of_threads(on_cpu)


def share_of_threads(num_lanes: int) -> int:
    """Return the number of torch threads per lane if lanes share them equally."""
    return max(1, torch.get_num_threads() // num_lanes)


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Limit torch to a number of threads in this block; None changes nothing.

    The caller's work between steps, such as the optimizer, should use no more threads than a lane. Torch's threads stay
    active for a while after their work is done, and take the cores from the lanes.
    """
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def autocast_of(own: torch.dtype | None, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype: the pipeline's own, or that around the call, because lanes do not inherit it."""
    if own is not None:
        return own
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
