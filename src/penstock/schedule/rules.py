"""The rule table: for each kind of action, what it needs, what it makes and what it frees.

This is the only place where dependencies are written. `flow` turns the table into arrays, and
`verify`, `lower`, `simulate`, the memory count and the executor's checks read those.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from penstock.schedule.actions import Kind

__all__ = ["GOAL", "RULES", "At", "Copy", "Need", "Rule", "Value", "Where"]


class Value(StrEnum):
    """A named thing that an action needs or makes; one for every stage and micro-batch."""

    ACTIVATION = "activation"  # a stage's output, for the stages after it
    GRADIENT = "gradient"  # of a stage's input, for the stages before it
    SENT_ACTIVATION = "sent activation"
    SENT_GRADIENT = "sent gradient"
    INPUT = "input"  # what recompute starts from
    SAVED = "saved"  # what the forward keeps for the backward
    PENDING = "pending"  # what the input gradient leaves for the weight gradient
    HOST = "offloaded"  # saved values, in host memory
    WEIGHT_GRAD = "weight gradient"
    WEIGHTS = "weights"  # the next version of a stage's weights


class At(Enum):
    """Whose value an action needs."""

    HERE = "this stage"
    BEFORE = "the stages before"
    AFTER = "the stages after"
    PEER = "the stage at the other end"


class Copy(Enum):
    """Which copy, where a value is made on one lane (or moment) and made again on another."""

    FIRST = "as first made"
    LATEST = "as received, recomputed or fetched"


class Where(Enum):
    """What an action occupies while it runs."""

    LANE = "the lane"
    LINK = "a link between two lanes"
    HOST_LINK = "the link between a lane and its host memory"
    NOTHING = "nothing: it ends when its transfer arrives"


@dataclass(frozen=True)
class Need:
    """One value an action waits for."""

    value: Value
    at: At = At.HERE
    copy: Copy = Copy.LATEST


@dataclass(frozen=True)
class Rule:
    """What one kind of action needs, makes, makes again and frees, and what it occupies."""

    where: Where
    needs: tuple[Need, ...] = ()
    makes: tuple[Value, ...] = ()
    remakes: tuple[Value, ...] = ()
    frees: tuple[Value, ...] = ()


RULES: dict[Kind, Rule] = {
    Kind.F: Rule(
        Where.LANE,
        needs=(Need(Value.ACTIVATION, At.BEFORE),),
        makes=(Value.ACTIVATION, Value.INPUT, Value.SAVED),
    ),
    Kind.B: Rule(
        Where.LANE,
        needs=(Need(Value.SAVED), Need(Value.GRADIENT, At.AFTER)),
        makes=(Value.GRADIENT, Value.WEIGHT_GRAD),
        frees=(Value.SAVED, Value.INPUT),
    ),
    Kind.I: Rule(
        Where.LANE,
        needs=(Need(Value.SAVED), Need(Value.GRADIENT, At.AFTER)),
        makes=(Value.GRADIENT, Value.PENDING),
        frees=(Value.SAVED, Value.INPUT),
    ),
    Kind.W: Rule(Where.LANE, needs=(Need(Value.PENDING),), makes=(Value.WEIGHT_GRAD,), frees=(Value.PENDING,)),
    Kind.U: Rule(Where.LANE, needs=(Need(Value.WEIGHT_GRAD),), makes=(Value.WEIGHTS,), frees=(Value.WEIGHT_GRAD,)),
    Kind.SEND_F: Rule(Where.LINK, needs=(Need(Value.ACTIVATION, copy=Copy.FIRST),), makes=(Value.SENT_ACTIVATION,)),
    Kind.RECV_F: Rule(Where.NOTHING, needs=(Need(Value.SENT_ACTIVATION, At.PEER),), remakes=(Value.ACTIVATION,)),
    Kind.SEND_B: Rule(Where.LINK, needs=(Need(Value.GRADIENT, copy=Copy.FIRST),), makes=(Value.SENT_GRADIENT,)),
    Kind.RECV_B: Rule(Where.NOTHING, needs=(Need(Value.SENT_GRADIENT, At.PEER),), remakes=(Value.GRADIENT,)),
    Kind.RECOMPUTE: Rule(Where.LANE, needs=(Need(Value.INPUT),), remakes=(Value.SAVED,)),
    Kind.OFFLOAD: Rule(
        Where.HOST_LINK, needs=(Need(Value.SAVED, copy=Copy.FIRST),), makes=(Value.HOST,), frees=(Value.SAVED,)
    ),
    Kind.FETCH: Rule(Where.HOST_LINK, needs=(Need(Value.HOST),), remakes=(Value.SAVED,), frees=(Value.HOST,)),
}

# What a training step is for: every stage makes this once for every micro-batch.
GOAL = Value.WEIGHT_GRAD

if missing := [kind for kind in Kind if kind not in RULES]:  # fails at import, not in the middle of a run
    raise RuntimeError(f"the rule table has no row for: {missing}")


def makers(value: Value) -> tuple[Kind, ...]:
    """Return the kinds that make a value first."""
    return tuple(kind for kind, rule in RULES.items() if value in rule.makes)


def occupying(where: Where) -> tuple[Kind, ...]:
    """Return the kinds that occupy a lane, a link, or nothing."""
    return tuple(kind for kind, rule in RULES.items() if rule.where is where)
