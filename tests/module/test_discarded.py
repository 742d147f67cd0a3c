"""A call that throws changes of buffers away warns once for each function, and no other call warns."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import funcshard as fs
from tests.ranks import run_simulated

x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Own(nn.Module):
    """A module that treats its buffer as ``do`` says."""

    def __init__(self, do: Any, persistent: bool = True, seen: torch.Tensor | None = None) -> None:
        super().__init__()
        self.lin, self.do = nn.Linear(3, 3), do
        self.register_buffer("seen", torch.zeros(3) if seen is None else seen, persistent=persistent)
        self.register_buffer("spread", torch.full((3,), torch.nan))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.do(self, x)
        return self.lin(x)


def assigns(module: Any, x: torch.Tensor) -> None:
    module.seen = module.seen + 1


def adds(module: Any, x: torch.Tensor) -> None:
    module.seen.add_(x.detach().mean(0))


def grows(module: Any, x: torch.Tensor) -> None:
    module.seen = torch.ones(5)


def uncounted(module: Any, x: torch.Tensor) -> None:
    F.batch_norm(x.detach(), module.seen, None if module.spread is None else torch.ones(3), training=True)


# name -> (module, names in the warning)
WARN: dict[str, tuple[Any, str]] = {
    "BatchNorm": (lambda: nn.BatchNorm1d(3), "'running_mean', 'running_var', 'num_batches_tracked'"),
    "BatchNorm inside": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
        "'1.running_mean', '1.running_var', '1.num_batches_tracked'",
    ),
    "two of them": (
        lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)),
        "'0.running_mean', '0.running_var', '0.num_batches_tracked', 3 more",
    ),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(3, 8)),
        "'parametrizations.weight.0._u', 'parametrizations.weight.0._v'",
    ),
    "a new tensor": (lambda: Own(assigns), "'seen'"),
    "in place": (lambda: Own(adds), "'seen'"),
    "one element of a column": (lambda: Own(assigns, seen=torch.zeros(1, 4)[:, 2]), "'seen'"),
    "another shape": (lambda: Own(grows), "'seen'"),
    "statistics that no version counts": (lambda: Own(uncounted), "'seen'"),
}


def calls(module: nn.Module, how: str, *, mutable: bool = False) -> Any:
    """Return the function of the module and a function that calls it, whole or sharded."""
    apply, params, buffers = fs.make_functional(module, mutable=mutable)
    if how == "whole":
        return apply, lambda f: f(params, buffers, x)
    mesh = fs.Mesh()
    plan = fs.make_plan(params, mesh, units=["*"] if isinstance(module, nn.Sequential) else [])
    shards = fs.shard(params, plan, mesh)
    return apply, lambda f: fs.fully_shard(f, plan, mesh)(shards, buffers, x)


@pytest.mark.parametrize("how", ["whole", "sharded"])
@pytest.mark.parametrize(("make", "names"), WARN.values(), ids=WARN)
def test_the_first_call_that_throws_a_change_away_warns_and_names_buffers_and_remedy(make, names, how) -> None:
    torch.manual_seed(0)
    apply, call = calls(make(), how)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for function in (apply, apply, apply.train()):  # the last one shares the state
            call(function)
    (warning,) = said
    assert f"changed buffers of the module ({names}), and the call threw the changes away: use make_functional(" in str(
        warning.message
    )
    assert "mutable=True), whose calls return the new buffers, or apply.eval() if" in str(warning.message)
    assert warning.filename == __file__


QUIET: dict[str, tuple[Any, Any]] = {
    "evaluation": (lambda: nn.Sequential(nn.BatchNorm1d(3)), lambda f: f.eval()),
    "no running statistics": (lambda: nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), lambda f: f),
    "no buffers": (lambda: nn.Sequential(nn.Linear(3, 3)), lambda f: f),
    "a buffer that is not saved": (lambda: Own(adds, persistent=False), lambda f: f),
    "a write of the same values": (lambda: Own(lambda m, x: m.seen.zero_()), lambda f: f),
    "buffers that are NaN": (lambda: Own(lambda m, x: None), lambda f: f),
}


@pytest.mark.parametrize("how", ["whole", "sharded"])
@pytest.mark.parametrize(("make", "change"), QUIET.values(), ids=QUIET)
def test_a_call_that_throws_nothing_away_does_not_warn(make, change, how) -> None:
    apply, call = calls(make(), how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(change(apply))
        call(change(apply))


def test_a_mutable_function_does_not_warn() -> None:
    apply, call = calls(nn.BatchNorm1d(3), "whole", mutable=True)
    assert apply.discarded is None
    assert call(apply)[1]["num_batches_tracked"] == 1


def test_a_change_in_a_later_call_is_seen() -> None:
    apply, params, buffers = fs.make_functional(Own(lambda module, x: adds(module, x) if x.sum() > 0 else None))
    apply(params, buffers, -torch.ones(2, 3))
    with pytest.warns(UserWarning, match=r"changed buffers of the module \('seen'\)"):
        apply(params, buffers, torch.ones(2, 3))


def test_each_function_warns_for_itself() -> None:
    for _ in range(2):
        apply, call = calls(nn.BatchNorm1d(3), "whole")
        with pytest.warns(UserWarning, match="threw the changes away"):
            call(apply)


def test_where_versions_and_values_cannot_be_read_the_call_is_silent() -> None:
    apply, params, buffers = fs.make_functional(nn.BatchNorm1d(3))
    params = {name: value.detach() for name, value in params.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.inference_mode():
            apply(params, buffers, x)
        torch.func.grad(lambda p: apply(p, buffers, x).square().sum())(params)
        meta = lambda tensors: {name: value.to("meta") for name, value in tensors.items()}  # noqa: E731
        apply(meta(params), meta(buffers), x.to("meta"))
    with pytest.warns(UserWarning, match="threw the changes away"):
        apply(params, buffers, x)


def test_buffers_cast_by_the_plan_are_compared_in_their_dtype_during_the_call() -> None:
    def main(mesh: fs.Mesh) -> int:
        apply, params, buffers = fs.make_functional(Own(lambda module, x: None))
        buffers["seen"] = torch.full((3,), 1 / 3)  # not a number in bfloat16
        precision = fs.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        plan = fs.make_plan(params, mesh, precision=precision)
        sharded = fs.fully_shard(apply, plan, mesh)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            sharded(fs.shard(params, plan, mesh), buffers, x)
        return len(said)

    assert run_simulated(main, 2) == [0, 0]
