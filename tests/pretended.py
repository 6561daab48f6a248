"""A GPU that is not there: some types of numbers are taken to be on it, so that a CPU can show what would happen."""

import torch

from penstock.doctor.sightings import Phase, Tally

ON_DEVICE = (torch.float64, torch.int64, torch.bool)
PINNED = torch.float16  # of the host; other types are of the host, and not pinned


class Pretended:
    is_real = is_in_use = True
    name = "a pretended GPU"

    def is_on_device(self, tensor):
        return tensor.dtype in ON_DEVICE

    def is_pinned(self, tensor):
        return tensor.dtype == PINNED

    def mark_results(self, tensors):
        pass

    def mark_fetched(self, tensor):
        pass

    def forget_freed(self):
        pass


def found(tally: Tally, phase: Phase | None = None):
    """Return what was noted: kinds, lines of code and counts."""
    return [(kind, place.code, entry.count) for (kind, place), entry in tally.entries(phase).items()]
