"""MemoryRetry: an update for which memory does not suffice is run again, with smaller micro-batches."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.devices.kinds import kind_of
from penstock.errors import HangError, LaneError, LostError, warn_user
from penstock.faults.out_of_memory import is_out_of_memory
from penstock.pipeline.smaller_micro_batches import split_finer
from penstock.pipeline.state_snapshot import StateSnapshot

if TYPE_CHECKING:
    from penstock.training.fault_handling import Faults
    from penstock.training.stepper import Made
    from penstock.training.trainer import Trainer

__all__ = ["MemoryRetry"]


class MemoryRetry:
    """Runs updates, and again with more micro-batches where memory ran out; the batch stays what it was.

    Buffers and random numbers are put back before the next try, so that the update is that of a training that had as
    many micro-batches from this step on.

    Args:
        trainer: whose updates; what it says of `on_oom` holds.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._pipe, self._stepper = trainer.pipe, trainer.stepper
        can_split = trainer.pipe.schedule.versions is None  # else weights have changed by then
        self._before = StateSnapshot(trainer.pipe) if trainer.asked.on_oom == "split" and can_split else None

    def run(self, items: Sequence[tuple[Any, ...]], faults: Faults, number: int, *, is_recorded: bool) -> Made:
        """Run forward and backward of an update.

        Raises:
            LaneError: when an action failed, and smaller micro-batches are no help.
        """
        if self._before is None:
            return self._stepper.run(items, is_recorded=is_recorded)
        told_before = ""
        while True:
            self._before.keep()
            try:
                return self._stepper.run(items, is_recorded=is_recorded)
            except (HangError, LostError):  # which are LaneErrors too: others may be gone
                raise
            except LaneError as error:
                message = str(error)
                count = self._pipe.schedule.num_mbs
                if not self._should_try_again(error):
                    if told_before:
                        error.add_note(told_before)
                    raise
            # outside: while an error is handled, its frames hold all that the step held
            told_before = f"with {count} micro-batches memory ran out: {message}"
            self._clear()
            self._tell(faults, number, message)

    def _should_try_again(self, error: LaneError) -> bool:
        if error.was_refused:  # the process that refused has left, and told why
            return False
        # an error that only some processes see as one of memory must not part them
        return all(self._pipe.internals.gather(is_out_of_memory(error))) and split_finer(self._pipe)

    def _clear(self) -> None:
        assert self._before is not None
        self._stepper.forget()
        self._before.put_back()
        gc.collect()
        for device in set(self._pipe.devices):
            kind_of(device).release_memory()

    def _tell(self, faults: Faults, number: int, message: str) -> None:
        count = self._pipe.schedule.num_mbs
        told = f"step {number}: memory ran out ({message}); it is run again, and all from now on, with {count} "
        told += f"micro-batches; give micro_batches={count} to begin with them"
        faults.tell("out of memory", number, told, micro_batches=count)
        warn_user(told)
