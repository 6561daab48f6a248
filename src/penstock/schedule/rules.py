"""Rules: the table of the values that each kind of action needs, makes and frees.

Dependencies are defined only here. `flow` turns the table into arrays. `verify`, `lower`, `simulate`, the memory
count and the checks of the executor read these arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from penstock.schedule.actions import Kind


class Value(StrEnum):
    """A named thing that an action needs or makes; there is one per stage and micro-batch."""

    ACTIVATION = "activation"  # output of a stage, for later stages
    GRADIENT = "gradient"  # gradient of the input of a stage, for earlier stages
    SENT_ACTIVATION = "sent activation"
    SENT_GRADIENT = "sent gradient"
    INPUT = "input"  # the input of a recompute
    SAVED = "saved"  # values that the forward keeps for the backward
    PENDING = "pending"  # values that the input gradient keeps for the weight gradient
    HOST = "offloaded"  # saved values, in host memory
    WEIGHT_GRAD = "weight gradient"
    WEIGHTS = "weights"  # the next version of a stage's weights


class At(Enum):
    """The stage whose value an action needs."""

    HERE = "this stage"
    BEFORE = "the stages before"
    AFTER = "the stages after"
    PEER = "the stage at the other end"


class Copy(Enum):
    """Which copy of a value an action needs, if the value is made first and made again later or on another lane."""

    FIRST = "as first made"
    LATEST = "as received, recomputed or fetched"


class Where(Enum):
    """The resource that an action occupies while it runs."""

    LANE = "the lane"
    LINK = "a link between two lanes"
    HOST_LINK = "the link between a lane and its host memory"
    NOTHING = "nothing: it ends when its transfer arrives"


@dataclass(frozen=True)
class Need:
    """One value that an action waits for."""

    value: Value
    at: At = At.HERE
    copy: Copy = Copy.LATEST


@dataclass(frozen=True)
class Rule:
    """The values that one kind of action needs, makes, makes again and frees, and the resource that it occupies."""

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

# The goal of a training step: each stage makes this value once for each micro-batch.
GOAL = Value.WEIGHT_GRAD

if missing := [kind for kind in Kind if kind not in RULES]:  # fails at import, not in the middle of a run
    raise RuntimeError(f"the rule table has no row for: {missing}")


def makers(value: Value) -> tuple[Kind, ...]:
    """Return the kinds that make a value for the first time."""
    return tuple(kind for kind, rule in RULES.items() if value in rule.makes)


def occupying(where: Where) -> tuple[Kind, ...]:
    """Return the kinds that occupy the given resource."""
    return tuple(kind for kind, rule in RULES.items() if rule.where is where)
