"""The law of the zoo: a sharded model equals itself, in every call.

A ``Subject`` builds a model of somebody else's package and its inputs. ``check`` runs the plain
module and the function of shards three times, with a different batch on each rank, and compares
outputs, gradients and buffers in float64.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module

__all__ = ["STRATEGIES", "Subject", "check", "tensors_in"]

CALLS = 3
# The same operations run on the same values, but gradients are added over ranks. A model may
# compute in float32 inside, whatever its dtype: the tolerance is relative to the largest value.
TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-5

STRATEGIES: dict[str, Mapping[str, Any]] = {
    "full_shard by class": {"mesh": {"shard": 2}, "units": "class"},
    "shard_grad_op by size": {"mesh": {"shard": 2}, "units": "size", "strategy": "shard_grad_op"},
    "no_shard": {"mesh": {"shard": 2}, "units": "none", "strategy": "no_shard"},
    "hybrid": {"mesh": {"replicate": 2, "shard": 2}, "units": "class"},
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model of another package.

    Attributes:
        name: the name in the table.
        package: the package that has to be installed.
        build: builds the module from its configuration, with random weights.
        inputs: ``inputs()`` returns new keyword arguments of ``forward``; it draws random numbers.
            A key of digits is a positional argument.
        blocks: names of the classes where people cut the model into units.
        float32_inside: whether the module computes in float32 whatever its dtype.
        dtype: the dtype of parameters and inputs.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    blocks: tuple[str, ...] = ()
    float32_inside: bool = False
    dtype: torch.dtype = torch.float64


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors of an output, in order: of containers, dataclasses, caches and objects."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, str | bytes | int | float | complex | nn.Module | type):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = list(value)
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        children = list(getattr(value, "__dict__", {}).values())
    for child in children:
        yield from tensors_in(child, seen)


def loss_of(output: Any) -> torch.Tensor:
    """Return a loss that every differentiable output enters."""
    terms = []
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            terms.append(real.double().nan_to_num(0, 0, 0).sin().mean())
    return torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64)


def call(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """Call with the positional and keyword arguments that ``inputs`` holds."""
    positional = [inputs[key] for key in sorted(key for key in inputs if key.isdigit())]
    return function(*positional, **{key: v for key, v in inputs.items() if not key.isdigit()})


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_inputs(item, dtype) for key, item in value.items()}
    return type(value)(cast_inputs(v, dtype) for v in value) if type(value) in (list, tuple) else value


def run_plain(
    module: nn.Module, batch: Mapping[str, Any], seed: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return outputs, gradients and new buffers of one call of a copy of ``module``."""
    module = copy.deepcopy(module)
    torch.manual_seed(seed)
    output = call(module, copy.deepcopy(batch))
    loss = loss_of(output)
    if loss.requires_grad:
        loss.backward()
    named = dict(module.named_parameters())
    grads = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        for name, parameter in named.items()
        if parameter.requires_grad
    }
    outputs = [tensor.detach().clone() for tensor in tensors_in(output)]
    return outputs, grads, dict(module.named_buffers())


def units_of(subject: Subject, module: nn.Module, params: Any, kind: str, batch: Any) -> Any:
    if kind == "none":
        return []
    if kind == "class" and subject.blocks:
        names = set(subject.blocks)
        return fs.wrap.by_function(lambda m: type(m).__name__ in names)(module)
    largest = max(p.numel() for p in params.values())
    inputs = copy.deepcopy(batch)
    positional = tuple(inputs.pop(key) for key in sorted(key for key in batch if key.isdigit()))
    # Why inputs: parents that read a parameter of their child are one unit with it.
    return fs.wrap.by_size(max(1, largest // 2))(module, inputs or positional)


def difference(subject: Subject, what: str, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return how two tensors differ, or ``None``."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{what}: {actual.dtype} {tuple(actual.shape)} in place of {expected.dtype} {tuple(expected.shape)}"
    if actual.layout != torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    if not actual.is_floating_point() and not actual.is_complex():
        return None if torch.equal(actual, expected) else f"{what}: other values"
    inexact = subject.float32_inside or expected.dtype in (torch.float32, torch.complex64)
    tolerance = FLOAT32_TOLERANCE if inexact else TOLERANCE
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(actual)):
        return f"{what}: finite elsewhere"
    if not finite.any():
        return None
    scale = expected[finite].abs().max().clamp(min=1.0)
    distance = (actual[finite] - expected[finite]).abs().max()
    return None if distance <= tolerance * scale else f"{what}: off by {distance.item():.3g} of {scale.item():.3g}"


def check(subject: Subject, strategy: str) -> list[str]:
    """Return the differences between a model and itself, sharded by one of ``STRATEGIES``."""
    options = dict(STRATEGIES[strategy])
    shape, kind = options.pop("mesh"), options.pop("units")
    world_size = math.prod(shape.values())
    torch.manual_seed(0)
    module = subject.build().train()
    if subject.dtype != torch.float32:  # Why: a cast to float32 takes the imaginary part away
        module = module.to(subject.dtype)
    batches = [cast_inputs(subject.inputs(), subject.dtype) for _ in range(world_size)]
    plain = [run_plain(module, batch, 10 + rank) for rank, batch in enumerate(batches)]
    apply, params, buffers = fs.make_functional(module, mutable=True)
    held = sizes_of(apply.skeleton.template)

    def run(function: Callable[..., Any], rank: int) -> Any:
        torch.manual_seed(10 + rank)
        return call(function, copy.deepcopy(batches[rank]))

    def compare(label: str, rank: int, outputs: list[torch.Tensor], buffers: Any, grads: Any) -> list[str | None]:
        expected_outputs, _, expected_buffers = plain[rank]
        if len(outputs) != len(expected_outputs):
            return [f"{label}: {len(outputs)} tensors in place of {len(expected_outputs)}"]
        pairs = [(f"output {i}", *each) for i, each in enumerate(zip(outputs, expected_outputs, strict=True))]
        pairs += [(name, buffers[name], expected_buffers[name]) for name in buffers]
        means = {name: sum(of_rank[name] for _, of_rank, _ in plain) / world_size for name in plain[0][1]}
        pairs += [(f"gradient of {name}", grad, means[name]) for name, grad in grads.items() if grad is not None]
        return [difference(subject, f"{label}, {what}", found, expected) for what, found, expected in pairs]

    def main(mesh: fs.Mesh) -> Any:
        units = units_of(subject, module, params, kind, batches[0])
        plan, sharded, shards = of_module(mesh, (apply, params, buffers), units, **options)

        def loss_fn(shards: Any) -> Any:
            output, new_buffers = run(functools.partial(sharded, shards, buffers), mesh.rank)
            detached = [tensor.detach().clone() for tensor in tensors_in(output)]
            # Some models' outputs depend on no parameter, and such a loss is an error.
            zeros = [0.0 * shard.abs().sum() for shard in tensors_in(shards) if shard.requires_grad]
            return sum(zeros[:1], loss_of(output)), (detached, new_buffers)

        evaluate, calls = fs.value_and_grad(loss_fn, has_aux=True), []
        for _ in range(CALLS):
            (_, aux), grads = evaluate(shards)
            calls.append((*aux, fs.gather(grads, plan, mesh)))
        return calls

    problems: list[str | None] = []
    for number in range(CALLS):
        output, new_buffers = run(functools.partial(apply, params, buffers), 0)
        outputs = [tensor.detach() for tensor in tensors_in(output)]
        problems += compare(f"apply, call {number}", 0, outputs, new_buffers, {})
    for rank, calls in enumerate(fs.simulate(main, shape)):
        for number, each in enumerate(calls):
            problems += compare(f"{strategy}, rank {rank}, call {number}", rank, *each)
    problems += ["a call left something in the modules"] * (sizes_of(apply.skeleton.template) != held)
    return [problem for problem in problems if problem]


def sizes_of(root: nn.Module) -> list[dict[str, int | None]]:
    """Return how much each attribute of each module holds."""
    return [
        {key: len(v) if isinstance(v, dict | list | set) else None for key, v in vars(m).items()} for m in root.modules()
    ]
