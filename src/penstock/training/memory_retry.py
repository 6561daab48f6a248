"""Memory retry: if memory runs out in an update, run it again with smaller micro-batches."""

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
    from penstock.training.fault_handling import FaultHandler
    from penstock.training.stepper import UpdateResult
    from penstock.training.trainer import Trainer


class MemoryRetry:
    """Runs updates. If memory runs out, it runs the same batch again with more micro-batches.

    Buffers and random states are restored before the next try. So the result is that of a training that has this number
    of micro-batches from this step on.

    Args:
        trainer: the trainer; its `on_oom` applies.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._pipe, self._stepper = trainer.pipe, trainer.stepper
        can_split = trainer.pipe.schedule.versions is None  # otherwise weights have changed already
        self._before = StateSnapshot(trainer.pipe) if trainer.options.on_oom == "split" and can_split else None

    def run(
        self, items: Sequence[tuple[Any, ...]], faults: FaultHandler, number: int, *, is_recorded: bool
    ) -> UpdateResult:
        """Run the forward and backward of an update.

        Raises:
            LaneError: if an action failed, and smaller micro-batches do not help.
        """
        if self._before is None:
            return self._stepper.run(items, is_recorded=is_recorded)
        note = ""
        while True:
            self._before.take()
            try:
                return self._stepper.run(items, is_recorded=is_recorded)
            except (HangError, LostError):  # subclasses of LaneError: other processes may be gone
                raise
            except LaneError as error:
                message = str(error)
                count = self._pipe.schedule.num_mbs
                if not self._can_retry(error):
                    if note:
                        error.add_note(note)
                    raise
            # outside of `except`: the error's frames keep the step's tensors alive
            note = f"memory ran out with {count} micro-batches: {message}"
            self._clear()
            self._report(faults, number, message)

    def _can_retry(self, error: LaneError) -> bool:
        if error.was_not_started:  # the process that refused has left and given the reason
            return False
        # all processes must decide the same, even if only some see it as out of memory
        return all(self._pipe.internals.gather(is_out_of_memory(error))) and split_finer(self._pipe)

    def _clear(self) -> None:
        assert self._before is not None
        self._stepper.forget()
        self._before.restore()
        gc.collect()
        for device in set(self._pipe.devices):
            kind_of(device).release_memory()

    def _report(self, faults: FaultHandler, number: int, message: str) -> None:
        count = self._pipe.schedule.num_mbs
        text = f"step {number}: memory ran out ({message}); this step and all later ones run with {count} micro-batches"
        text += f"; pass micro_batches={count} to start with this number"
        faults.report("out of memory", number, text, micro_batches=count)
        warn_user(text)
