"""Batch comparison: a check that all processes have the same batches.

Processes compare digests at the end of a call. All lanes have begun the call by then, so no process has to wait. A
digest of GPU tensors is known only after the call. It is compared at once in the first calls, and later at the end of
the next call.
"""

from __future__ import annotations

from penstock.errors import LostError
from penstock.runtime.step import Step
from penstock.runtime.wire.batch_digests import Digest, differences
from penstock.runtime.wire.process_transport import ProcessTransport

_COMPARED_FIRST, _COMPARED_EVERY = 3, 50  # the first calls of each kind are compared, then every 50th
_SAME = (
    "Each lane uses its part of every batch, so give every process the same batches in the same order: use no "
    "DistributedSampler, and shuffle with the same seed in all processes (docs/howto/processes.md)"
)


class BatchComparison:
    """The batches of this process that have not been compared yet.

    Args:
        transport: carries the digests.
        num_lanes: the number of processes.
    """

    def __init__(self, transport: ProcessTransport, num_lanes: int) -> None:
        self._transport, self._num_lanes = transport, num_lanes
        self._digests: dict[int, Digest] = {}  # by step
        self._num_ended: dict[tuple[bool, bool], int] = {}  # calls of each kind that have ended
        self._latest = (0, (False, False))  # the number and the kind of the latest call

    def clear(self) -> None:
        """Forget all batches and all calls."""
        self._digests.clear()
        self._num_ended.clear()

    def forget_latest(self) -> None:
        """Do not compare the batch of the latest call."""
        self._digests.pop(self._latest[0], None)

    def look(self, step: Step) -> None:
        """Compute the digest of a batch if it must be compared; if it is known at once, send it to the others."""
        kind = (step.mode.is_training, step.mode.has_backward)
        self._latest = (step.number, kind)
        is_capture = step.tapes is not None and not all(tape.is_replay for tape in step.tapes.values())
        is_due = self._num_ended.get(kind, 0) < _COMPARED_FIRST or step.number % _COMPARED_EVERY == 0
        if step.given and is_due and not is_capture:
            digest = self._digests[step.number] = Digest(step.given, step.number)
            if digest.is_ready:
                self._tell(step.number, digest)

    def _tell(self, number: int, digest: Digest) -> None:
        try:
            for other in self._transport.links.peers:
                self._transport.send_message(other, f"batch {number}", digest.rows())
        except LostError:
            self._transport.check()  # raises the reason, if the lost process sent one before it left
            raise

    def compare(self) -> str:
        """End a call; return a message about the differences between batches that are known by now, or "".

        All processes return the same message at the end of the same call.
        """
        now, kind = self._latest
        latest = self._digests.get(now)
        if latest is not None and not latest.is_ready:
            self._tell(now, latest)
        ended = self._num_ended[kind] = self._num_ended.get(kind, 0) + 1
        found: list[str] = []
        for number in [number for number in self._digests if number < now or ended <= _COMPARED_FIRST]:
            own = self._digests.pop(number).rows()
            everyone = [
                own if lane == self._transport.lane else self._transport.receive_message(lane, f"batch {number}")
                for lane in range(self._num_lanes)
            ]
            found += [f"in call {number} {told}" for told in differences(everyone)]
        return f"the processes were given different batches: {'; '.join(found)}. {_SAME}" if found else ""
