"""Check that the state in a state dict is of this optimizer, by the names of leaves' entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from funcshard.train import KnownEntries, MuonStep, TorchStep

__all__ = ["LeafState", "check_names"]

LeafState = dict[str, Any]
"""The state of one parameter: ``{"exp_avg": tensor, "step": tensor, ...}``."""


def check_names(by_path: dict[str, LeafState], step: Any, device: torch.device) -> None:
    """Raise ``ValueError`` unless the state of each leaf has the names that the optimizer keeps."""
    if isinstance(step, MuonStep):
        kept = [{"momentum_buffer"}] * step.layout.count
    elif step.cls.__module__.startswith("torch.optim."):
        kept = [_names_kept(step, options, device) for options in step.options]
    else:
        return  # a class of the user's own may keep other names for other leaves
    known = KnownEntries({"momentum_buffer": True}, exact=True) if isinstance(step, MuonStep) else step.known
    for path, own in by_path.items():
        group = 0 if step.layout is None else step.layout.group_of.get(path)
        # Why leaves without state pass: some optimizers keep none of a leaf that got no gradient.
        missing = sorted(kept[group] - own.keys()) if own and group is not None else []
        if missing:
            raise ValueError(
                f"the optimizer's state dict must hold {missing} of leaf {path!r}, which this optimizer keeps; found "
                f"{sorted(own)}: it is of another optimizer, or of other options; make the optimizer as it was made then, "
                f"or begin with its init"
            )
        if group is None or known is None or not known.exact:
            continue
        if unexpected := sorted(name for name in own.keys() - known.flat.keys() if own[name] is not None):
            raise ValueError(
                f"the optimizer's state dict must hold {sorted(known.flat) or 'nothing'} of leaf {path!r}, as this "
                f"optimizer keeps; found {unexpected} too: it is of another optimizer, or of other options; make the "
                f"optimizer as it was made then, or begin with its init"
            )


def _names_kept(step: TorchStep, options: Mapping[str, Any], device: torch.device) -> set[str]:
    """Return the names of the state that an optimizer keeps of a leaf, from a step on one zero."""
    alone = TorchStep(step.cls, ({**step.options[0], **options},), None, None)
    zero = lambda: {"leaf": torch.zeros(1, device=device)}  # noqa: E731
    return set(alone(zero(), {"steps": 0, "leaves": {"leaf": {}}}, zero())[1]["leaves"]["leaf"])
