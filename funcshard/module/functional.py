"""``make_functional``: any ``nn.Module`` as a pure function of its parameters and buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from funcshard.module.skeleton import Skeleton, make_skeleton

__all__ = ["Functional", "make_functional"]

Tensors = dict[str, torch.Tensor]


def make_functional(module: nn.Module, mutable: bool = False) -> tuple[Functional, Tensors, Tensors]:
    """Turn a module into a pure function, its parameters and its buffers.

    The function changes neither the module nor what it is given, and nothing that is done to the module later reaches
    it: the tensors returned are copies. Tied parameters appear once, under their first name, and stay tied.

    Arguments:
        module: any module, on any device, ``"meta"`` included.
        mutable: whether the function also returns the buffers as the call left them (BatchNorm's running statistics).

    Returns:
        ``(apply, params, buffers)``. ``apply(params, buffers, *args, **kwargs)`` returns what the module returns, or,
        with ``mutable``, the pair of that and the new buffers. ``params`` and ``buffers`` are ``{name: tensor}``; the
        parameters keep their ``requires_grad``.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(2, 1))
        >>> zeros = {name: torch.zeros_like(value) for name, value in params.items()}
        >>> apply(zeros, buffers, torch.ones(1, 2))
        tensor([[0.]])

    Source: ``torch.func.functional_call``; why it is not called here is said in ``skeleton.py``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"make_functional takes a torch.nn.Module; found {type(module).__name__}")
    skeleton, params, buffers = make_skeleton(module)
    for name, places in skeleton.parameters.items():
        # make_plan reads where a parameter is tied, and in which modules it stands
        if len(places) > 1:
            params[name].funcshard_paths = places  # type: ignore[attr-defined]
        params[name].funcshard_modules = {place: skeleton.classes(place) for place in places}  # type: ignore[attr-defined]
    return Functional(skeleton, mutable), params, buffers


@dataclass(frozen=True, slots=True, eq=False)
class Functional:
    """A module as a pure function: ``apply(params, buffers, *args, **kwargs)``; made by ``make_functional``.

    Attributes:
        skeleton: the module without its tensors.
        mutable: whether calls return new buffers too.
        method_name: the method that a call runs.
        training: the training flag of every module; ``None`` leaves each as it was.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Dropout(0.5))
        >>> apply.eval()(params, buffers, torch.ones(3))
        tensor([1., 1., 1.])
    """

    skeleton: Skeleton
    mutable: bool
    method_name: str = "forward"
    training: bool | None = None

    def __call__(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], /, *args: Any, **kwargs: Any
    ) -> Any:
        self.check_names("params", params, self.skeleton.parameters)
        module = self.skeleton.instantiate(params, self.copies(buffers), training=self.training)[0]
        return self.run(module, args, kwargs)

    def method(self, name: str) -> Functional:
        """Return the function that runs another method of the module, of the same parameters and buffers.

        Raises:
            AttributeError: the module has no such method.
        """
        if not callable(getattr(self.skeleton.bare, name, None)):
            raise AttributeError(f"{type(self.skeleton.bare).__name__} has no method {name!r}")
        return dataclasses.replace(self, method_name=name)

    def train(self, mode: bool = True) -> Functional:
        """Return the function with every module in training mode; ``eval`` is the inverse."""
        return dataclasses.replace(self, training=mode)

    def eval(self) -> Functional:
        """Return the function with every module in evaluation mode; ``train`` is the inverse."""
        return self.train(False)

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The names of each tied parameter, for ``make_plan(..., ties=...)``."""
        return tuple(places for places in self.skeleton.parameters.values() if len(places) > 1)

    def persistent(self, buffers: Mapping[str, torch.Tensor]) -> Tensors:
        """Return those of ``buffers`` that the module's state dict holds, under every name that it holds them by."""
        places = self.skeleton.buffers
        saved = self.skeleton.persistent
        return {name: buffers[first] for first in buffers for name in places[first] if name in saved}

    def copies(self, buffers: Mapping[str, torch.Tensor]) -> Tensors:
        """Copy the buffers for one call, which may write into them."""
        self.check_names("buffers", buffers, self.skeleton.buffers)
        return {name: buffer.clone() for name, buffer in buffers.items()}

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the method on a call's own module tree."""
        target = module if self.method_name == "forward" else getattr(module, self.method_name)
        out = target(*args, **kwargs)
        if not self.mutable:
            return out
        now = dict(module.named_buffers(remove_duplicate=False))
        # copies, because who computes a part of forward again in backward writes into the call's buffers again
        return out, {name: now[name].detach().clone() for name in self.skeleton.buffers}

    @staticmethod
    def check_names(what: str, given: Any, expected: Mapping[str, Any]) -> None:
        """Raise unless ``given`` maps exactly the expected names."""
        if not isinstance(given, Mapping):
            raise TypeError(f"{what} must be a dictionary {{name: tensor}}; found {type(given).__name__}")
        if given.keys() != expected.keys():
            missing, unexpected = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
            raise ValueError(
                f"{what} must hold the module's names; missing: {missing[:3] or 'nothing'}, unexpected: "
                f"{unexpected[:3] or 'nothing'}: pass what make_functional returned, or a tree like it"
            )
