"""Fault spec: which fault happens where, and its text form."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from penstock.errors import UsageError, nearest
from penstock.schedule.actions import Kind

# the kinds of fault, with a description
KINDS = {
    "kill": "the process gets SIGKILL",
    "stop": "the process gets SIGSTOP: it hangs, and its own code cannot notice",
    "exit": "the process ends with a code",
    "raise": "an exception, like one of the user's own code",
    "oom": "an out-of-memory exception",
    "nan": "the action's results become NaN",
    "corrupt": "one bit of the action's results flips",
    "delay": "the action takes longer",
    "drop": "a message is not sent",
}
POINTS = ("step", "data", "optimizer", "save")  # places outside of actions
_MAKING = ("F", "B", "I", "W", "RECOMPUTE", "RECV_F", "RECV_B")  # actions that make values
_SENDING = ("SEND_F", "SEND_B")
_KEYS = ("lane", "rank", "step", "action", "attempt", "seconds", "code")
_CHAOS_KEYS = ("mtti", "seed", "kinds")
_ACTION = re.compile(r"([0-9]*)(" + "|".join(sorted((k.value for k in Kind), key=len, reverse=True)) + r")([0-9]*)")


@dataclass(frozen=True)
class FaultSpec:
    """One fault to inject; a field that is None matches everything.

    >>> print(FaultSpec.parse("kill@lane=1,step=3,action=B2"))
    kill@lane=1,step=3,action=B2
    """

    kind: str
    lane: int | None = None
    rank: int | None = None  # the process
    step: int | None = None
    # a kind of action (`F`), with its micro-batch (`B2`) or also its stage (`1F0`); or a point outside actions
    action: str | None = None
    attempt: int = 0  # the number of restarts before the fault: by default, it does not happen again after a restart
    seconds: float | None = None  # the length of a delay
    code: int | None = None  # the exit code

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"fault {self.kind!r}: not one of {', '.join(KINDS)}.{nearest(self.kind, KINDS)}")
        what = self._check_action()
        if (self.kind == "delay") != (self.seconds is not None):
            raise UsageError(f"fault {self.kind}: a delay needs seconds=, and no other fault takes it")
        if self.code is not None and (self.kind != "exit" or not 0 <= self.code < 256):
            raise UsageError("fault exit: code= must be 0 to 255, and no other fault takes it")
        if self.kind in ("nan", "corrupt") and what not in _MAKING:
            raise UsageError(f"fault {self.kind}: needs action= with a kind that makes values: {', '.join(_MAKING)}")
        if self.kind == "drop" and what not in _SENDING:
            raise UsageError(f"fault drop: needs action= with a kind that sends: {', '.join(_SENDING)}")

    def _check_action(self) -> str | None:
        """Return the kind of action, or the point."""
        if self.action is None or self.action in POINTS:
            return self.action
        match = _ACTION.fullmatch(self.action)
        if match is None:
            words = [*POINTS, *(kind.value for kind in Kind)]
            raise UsageError(
                f"fault {self.kind}: action {self.action!r} is invalid: give a kind (F), a kind and micro-batch (B2), "
                f"a stage as well (1F0), or one of {', '.join(POINTS)}.{nearest(self.action, words)}"
            )
        return match[2]

    @property
    def is_at_action(self) -> bool:
        """Whether the fault happens at an action of the schedule, which is the default."""
        return self.action not in POINTS

    def is_action(self, kind: str, stage: int, mb: int) -> bool:
        """Return whether the fault matches an action."""
        if self.action is None:
            return True
        match = _ACTION.fullmatch(self.action)
        if match is None or match[2] != kind:
            return False
        return match[1] in ("", str(stage)) and match[3] in ("", str(mb))

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """Parse the text form of a fault."""
        kind, _, rest = text.partition("@")
        given = _read_pairs(rest, _KEYS, text) if rest.strip() else {}
        numbers = {key: _whole(key, given[key]) for key in ("lane", "rank", "step", "attempt", "code") if key in given}
        seconds = _seconds("seconds", given["seconds"]) if "seconds" in given else None
        return cls(kind.strip(), action=given.get("action"), seconds=seconds, **numbers)

    def __str__(self) -> str:
        named = {key: getattr(self, key) for key in _KEYS}
        text = ",".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in named.items() if v or v == 0)
        text = text.replace(",attempt=0", "").removeprefix("attempt=0").removeprefix(",")
        return f"{self.kind}@{text}" if text else self.kind


@dataclass(frozen=True)
class Chaos:
    """Random faults."""

    mtti: float  # the mean time between two faults, in seconds, over all processes
    seed: int = 0  # the same seed gives the same faults at the same times
    kinds: tuple[str, ...] = ("kill", "stop", "raise")  # to choose from

    def __post_init__(self) -> None:
        able = ("kill", "stop", "exit", "raise", "oom")
        wrong = [kind for kind in self.kinds if kind not in able]
        if wrong or not self.kinds:
            word = wrong[0] if wrong else ""
            raise UsageError(f"chaos: kinds: {'+'.join(able)}; given: {'+'.join(self.kinds)}.{nearest(word, able)}")

    def __str__(self) -> str:
        return f"mtti={self.mtti:g}s,seed={self.seed},kinds={'+'.join(self.kinds)}"


def parse(text: str) -> list[FaultSpec | Chaos]:
    """Parse faults, separated by semicolons; raise a UsageError with the invalid part."""
    pieces = [piece.strip() for piece in text.split(";") if piece.strip()]
    if not pieces:
        raise UsageError(f"faults {text!r}: empty; example: kill@lane=1,step=3,action=B2")
    return [_chaos(piece) if "@" not in piece and "=" in piece else FaultSpec.parse(piece) for piece in pieces]


def _chaos(text: str) -> Chaos:
    given = _read_pairs(text, _CHAOS_KEYS, text)
    if "mtti" not in given:
        raise UsageError(f"faults {text!r}: give kind@lane=..., or mtti=5s for random faults")
    more = {} if "kinds" not in given else {"kinds": tuple(k.strip() for k in given["kinds"].split("+"))}
    return Chaos(_seconds("mtti", given["mtti"]), _whole("seed", given.get("seed", "0")), **more)


def _read_pairs(text: str, keys: tuple[str, ...], whole: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for piece in text.split(","):
        key, is_pair, value = (part.strip() for part in piece.partition("="))
        if not is_pair or not value:
            raise UsageError(f"faults {whole!r}: {piece.strip()!r} is not name=value")
        if key not in keys:
            raise UsageError(f"faults {whole!r}: {key!r} is not one of {', '.join(keys)}.{nearest(key, keys)}")
        if key in given:
            raise UsageError(f"faults {whole!r}: {key} is given twice")
        given[key] = value
    return given


def _whole(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"faults: {key}={text}: must be a whole number of at least 0")
    return int(text)


def _seconds(key: str, text: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(ms|s|m|h)?", text)
    factor = {"ms": 1e-3, None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
    seconds = float(match[1]) * factor[match[2]] if match else math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"faults: {key}={text}: must be a time above 0, for example 5s, 200ms or 1m")
    return seconds
