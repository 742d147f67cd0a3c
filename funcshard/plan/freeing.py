"""When the gathered leaves of a unit are freed: the two options of a plan, and their checks.

- ``reshard_after_forward``: whether a unit is freed between forward and backward. ``None`` leaves
  the decision to the strategy.
- ``reshard_after_backward``: whether a unit that stays gathered after forward is freed after the
  backward of every micro-batch, or only after that of the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funcshard._utils import check_count, check_flag

# The options, with their defaults.
FREEING: Mapping[str, bool | int | None] = {
    "reshard_after_forward": None,
    "reshard_after_backward": True,
}


def check_freeing(options: Mapping[str, Any], strategy: str, unit: str | None = None) -> None:
    """Raise unless the two options are valid for ``strategy``.

    Arguments:
        options: the options of ``make_plan``, or those that one unit overrides.
        strategy: the strategy that they are used with.
        unit: the unit that overrides them; ``None`` for the options of ``make_plan``.
    """
    forward = options.get("reshard_after_forward")
    if forward is not None and not isinstance(forward, bool):
        remedy = "pass True, False, or the ranks of a machine; leave it out if the strategy decides"
        check_count("reshard_after_forward", forward, of="ranks", remedy=remedy)
    check_flag("reshard_after_backward", options.get("reshard_after_backward", True))
    if forward and strategy == "no_shard":
        where = "" if unit is None else f"unit {unit or '(root)'!r}: "
        raise ValueError(
            f"{where}reshard_after_forward={forward!r} frees gathered leaves, and the strategy "
            "'no_shard' gathers none; found both: leave it out, or choose 'full_shard'"
        )


def freeing_of(
    name: str,
    strategy: str,
    shards: int,
    *,
    reshard_after_forward: bool | int | None,
    reshard_after_backward: bool,
) -> tuple[bool | int, bool]:
    """Return whether a unit is freed after forward, and after the backward of every micro-batch.

    ``shards`` is the number of ranks on the shard axis. A number of ranks stays one if it is
    neither 1, which frees nothing, nor ``shards``, which frees all but the shard.

    Raises:
        ValueError: the unit is freed after forward, but should stay gathered after backward, or a
            number of ranks does not divide that of the shard axis.
    """
    if strategy == "no_shard":
        return False, True
    # Why the root is not freed: backward would gather it again right after forward.
    chosen = (
        strategy == "full_shard" and name != ""
        if reshard_after_forward is None
        else reshard_after_forward
    )
    if not isinstance(chosen, bool):
        chosen = int(chosen)
        if shards % chosen:
            raise ValueError(
                f"reshard_after_forward must be a number of ranks that divides the {shards} ranks "
                f"of the shard axis; found {chosen} for unit {name or '(root)'!r}: pass a divisor, "
                "such as the ranks of one machine, or True"
            )
        chosen = chosen if 1 < chosen < shards else chosen == shards > 1
    if chosen and not reshard_after_backward:
        raise ValueError(
            "reshard_after_backward=False keeps a unit gathered until the next micro-batch, so it "
            f"must stay gathered after forward too; found that unit {name or '(root)'!r} is freed "
            "after forward: pass strategy='shard_grad_op' or reshard_after_forward=False, or "
            "override the option for single units only"
        )
    return chosen, reshard_after_backward
