"""The options that ``value_and_grad`` and ``accumulate`` share, with their errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from funcshard._utils import check_flag, check_number
from funcshard.comm import Mesh, check_once, text_of
from funcshard.core.grad_hooks import OnGrads, OnReduceScattered
from funcshard.plan import Reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOptions:
    """How a loss and its gradient are computed.

    Attributes:
        mesh: the ranks that the mean runs over, if they are given.
        has_aux: whether the loss function returns ``aux`` too.
        weighted: whether it returns a weight.
        reduce: when the gradients of micro-batches are reduced; see ``accumulate``.
        on_grads: called before each reduction.
        on_reduce_scattered: called between the stages of each reduction.
        divisor: the divisor of all gradients, in place of the number of ranks or the weights.
        allow_constant: whether a loss that depends on no trainable shard is no error.
    """

    mesh: Mesh | None = None
    has_aux: bool = False
    weighted: bool = False
    reduce: Reduce = "each"
    on_grads: OnGrads | None = None
    on_reduce_scattered: OnReduceScattered | None = None
    divisor: float | None = None
    allow_constant: bool = False

    def __post_init__(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise TypeError(
                f"mesh must be a Mesh, or None; found {type(self.mesh).__name__}: pass the result "
                "of init_mesh, by name"
            )
        for name in ("has_aux", "weighted", "allow_constant"):
            check_flag(name, getattr(self, name))
        if self.divisor is not None:
            check_number(
                "divisor",
                self.divisor,
                above=0,
                none="for the number of ranks",
                remedy="pass 1 for the sum over ranks",
            )
            object.__setattr__(self, "divisor", float(self.divisor))

    def compare(self, called: str, names: list[str], **others: Any) -> None:
        """Raise if ranks of the mesh have different options.

        Arguments:
            called: name of the function that the user called.
            names: names of the options to compare.
            others: further options of that function.
        """
        if self.mesh is not None:
            values = {**others, **{name: getattr(self, name) for name in names}}
            check_once(self.mesh, {name: text_of(value) for name, value in values.items()}, called)
