"""Keep policies: the ways in which a stage treats its saved values. A new policy has a name and a row here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.errors import ScheduleError, nearest

Keep = Literal["hold", "recompute", "except_last", "offload"]  # of a stage
KeepRequest = Literal["hold", "recompute", "except_last", "offload", "fit"]  # of a pipeline


@dataclass(frozen=True)
class KeepPolicy:
    """One keep policy."""

    name: KeepRequest  # the name in options
    meaning: str  # the description for help texts
    price: str = ""  # the cost, for advice
    recomputes: bool = False  # whether forwards run again before their backwards
    spares_last: bool = False  # whether the last micro-batch is not recomputed, since its backward comes soon
    offloads: bool = False  # whether saved values move to host memory and back
    planned_as: Keep = "hold"  # the policy that determines the time and the memory of a stage when cuts are chosen
    graph_obstacle: str = ""  # the reason why such stages cannot run as CUDA graphs


POLICIES: dict[str, KeepPolicy] = {
    policy.name: policy
    for policy in (
        KeepPolicy("hold", "keep them"),
        KeepPolicy(
            "recompute", "run the forward again", price="every forward runs twice",
            recomputes=True, planned_as="recompute",
        ),
        KeepPolicy(
            "except_last", "run the forward again, except for the last micro-batch",
            price="nearly every forward runs twice", recomputes=True, spares_last=True, planned_as="except_last",
        ),
        KeepPolicy(
            "offload", "move them to host memory and back", price="saved values move to host memory and back",
            offloads=True, graph_obstacle='keep="offload" moves saved values by hand',
        ),
        KeepPolicy(
            "fit", "run only as much of the forward again as memory_limit requires",
            price="recomputes only as much as necessary", planned_as="recompute",
        ),
    )
}  # fmt: skip
CHOSEN_BY_NODE = "fit"  # for a whole pipeline: the stages hold saved values, but chosen nodes run again
PLANNED: tuple[Keep, ...] = ("hold", *(p.planned_as for p in POLICIES.values() if p.name == p.planned_as != "hold"))


def listed(names: Iterable[str]) -> str:
    """Return some policies with their descriptions, for help texts.

    >>> listed(["hold", "recompute"])
    'hold (keep them), recompute (run the forward again)'
    """
    return ", ".join(f"{name} ({POLICIES[name].meaning})" for name in names)


def of_stages(keep: KeepRequest | Sequence[Keep]) -> Keep | Sequence[Keep]:
    """Return the policy of the stages; with "fit", they hold their saved values, and chosen nodes run again."""
    return "hold" if keep == "fit" else keep


def check_keep(keep: Keep | Sequence[Keep], num_stages: int) -> tuple[Keep, ...]:
    """Return one policy per stage.

    Raises:
        ScheduleError: for unknown policies, or a wrong number of them.
    """
    if not isinstance(keep, (str, Sequence)):
        raise ScheduleError(f"keep: {keep!r} is not a policy or a list of policies")
    policies = (keep,) * num_stages if isinstance(keep, str) else tuple(keep)
    known = get_args(Keep)
    for policy in policies:
        if policy not in known:
            hint = nearest(str(policy), known)
            raise ScheduleError(f"keep: {policy!r} is not one of {', '.join(known)}.{hint}")
    if len(policies) != num_stages:
        raise ScheduleError(f"keep: pass one policy, or one per stage; policies: {len(policies)}, stages: {num_stages}")
    return policies
