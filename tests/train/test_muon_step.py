"""Muon on shards equals ``torch.optim.Muon`` on the whole model, with the predicted collectives."""

import math
from functools import partial
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from funcshard.testing import delayed
from tests.ranks import run_simulated

EVEN, ODD = (32, 16, 48), (13, 7, 9)
MUON = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
ADAMW = {"lr": 0.01, "weight_decay": 0.2}
NO_DECAY = {"paths": ["norm", "**.b"], "weight_decay": 0.0}


def example(seed: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    width, small, wide = sizes

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    blocks = [
        {"w": normal(width, width), "b": normal(width), "up": normal(wide, width), "down": normal(small, wide)}
        for _ in range(3)
    ]
    return {"emb": normal(wide, width), "blocks": blocks, "norm": normal(width)}


def named(params: Any) -> dict[str, torch.Tensor]:
    _, leaves, paths = tree.describe(params)
    return dict(zip(paths, leaves, strict=True))


def on_the_whole(sizes: tuple[int, ...], steps: int, options: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    params = {path: torch.nn.Parameter(leaf) for path, leaf in named(example(0, sizes, dtype)).items()}
    matrices = [leaf for path, leaf in params.items() if leaf.ndim == 2 and path != "emb"]
    biases = [leaf for leaf in params.values() if leaf.ndim == 1]
    muon = torch.optim.Muon(matrices, **options)
    adamw = torch.optim.AdamW([{"params": [params["emb"]]}, {"params": biases, "weight_decay": 0.0}], **ADAMW)
    for step in range(steps):
        for path, grad in named(example(100 + step, sizes, dtype)).items():
            params[path].grad = grad
        muon.step()
        adamw.step()
    return {path: leaf.detach() for path, leaf in params.items()}


def on_shards(
    mesh: fs.Mesh,
    sizes: tuple[int, ...],
    steps: int,
    options: dict,
    dtype: torch.dtype = torch.float32,
    strategy: str = "full_shard",
    units: tuple[str, ...] = ("blocks.*",),
) -> dict[str, torch.Tensor]:
    params = example(0, sizes, dtype)
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy)
    optimizer = fs.muon(plan, mesh, matrices=["blocks.*"], adamw={**ADAMW, "groups": [NO_DECAY]}, **options)
    shards = fs.shard(params, plan, mesh)
    pointers = [leaf.data_ptr() for leaf in tree.leaves(shards)]
    state = optimizer.init(shards)
    for step in range(steps):
        grads = fs.shard(example(100 + step, sizes, dtype), plan, mesh)
        with fs.record_events() as events:
            shards, state = optimizer.step(grads, state, shards)
        assert tuple(events) == optimizer.step.owners.events
    assert [leaf.data_ptr() for leaf in tree.leaves(shards)] == pointers  # donated
    assert state["steps"] == steps
    return named(fs.gather(shards, plan, mesh))


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[path], theirs[path]) for path in ours)


CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    **{
        f"{name} sizes on {world}": (world, sizes, MUON, {})
        for name, sizes in {"even": EVEN, "odd": ODD}.items()
        for world in (1, 2, 3, 4, {"replicate": 2, "shard": 2})
    },
    "no momentum look-ahead": (3, ODD, {**MUON, "nesterov": False}, {}),
    "rms": (3, ODD, {**MUON, "adjust_lr_fn": "match_rms_adamw"}, {}),
    "fewer iterations": (3, ODD, {**MUON, "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3}, {}),
    "tensor lr": (3, ODD, {**MUON, "lr": torch.tensor(0.05)}, {}),
    "bfloat16": (3, ODD, MUON, {"dtype": torch.bfloat16}),
    "no_shard": (3, ODD, MUON, {"strategy": "no_shard"}),
    "one unit": (3, ODD, MUON, {"units": ()}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "sizes", "options", "more"), CASES.values(), ids=CASES)
def test_four_steps_on_shards_are_four_steps_on_the_whole(
    world: Any, sizes: tuple[int, ...], options: dict[str, Any], more: dict[str, Any]
) -> None:
    expected = on_the_whole(sizes, 4, options, more.get("dtype", torch.float32))
    assert not torch.equal(expected["blocks.0.w"], named(example(0, sizes))["blocks.0.w"])
    ranks, shape = (world, None) if isinstance(world, int) else (math.prod(world.values()), world)
    for params in run_simulated(partial(on_shards, **more), ranks, sizes, 4, options, shape=shape):
        if "dtype" in more:  # so coarse that a kernel's vector instructions matter
            torch.testing.assert_close(params, expected, rtol=0.02, atol=0.02)
        else:
            assert equal(params, expected)


def slowly(mesh: fs.Mesh) -> dict[str, torch.Tensor]:
    return on_shards(delayed(mesh, "all_to_all", 0.002), ODD, 2, MUON)


@pytest.mark.slow
def test_the_step_waits_for_the_all_to_alls() -> None:
    expected = on_the_whole(ODD, 2, MUON, torch.float32)
    assert all(equal(params, expected) for params in run_simulated(slowly, 2))


def test_options_may_be_schedules() -> None:
    def main(mesh: fs.Mesh) -> bool:
        params = {"w": torch.eye(4)}
        plan = fs.make_plan(params, mesh)
        optimizer = fs.muon(plan, mesh, lr=lambda step: 0.1 * step, weight_decay=0.0)
        shards = fs.shard(params, plan, mesh)
        grads = fs.shard({"w": torch.ones(4, 4)}, plan, mesh)
        shards, state = optimizer.step(grads, optimizer.init(shards), shards)
        still = torch.equal(fs.gather(shards, plan, mesh)["w"], torch.eye(4))
        shards, state = optimizer.step(grads, state, shards)
        return still and not torch.equal(fs.gather(shards, plan, mesh)["w"], torch.eye(4))

    assert fs.simulate(main, 2) == [True, True]


def test_matrices_that_are_local_to_a_rank_are_updated_there_without_collectives() -> None:
    def main(mesh: fs.Mesh) -> None:
        params = {"expert": torch.eye(4) + mesh.rank, "b": torch.ones(3)}
        grads = {"expert": torch.arange(16.0).view(4, 4) * (mesh.rank + 1), "b": torch.zeros(3)}
        plan = fs.make_plan(params, mesh, local=["expert"])
        optimizer = fs.muon(plan, mesh, **MUON)
        shards = fs.shard(params, plan, mesh)
        with fs.record_events() as events:
            shards, _ = optimizer.step(fs.shard(grads, plan, mesh), optimizer.init(shards), shards)
        assert tuple(events) == optimizer.step.owners.events == ()
        assert optimizer.step.owners.of == {"expert": None}
        leaf = torch.nn.Parameter(params["expert"].clone())
        leaf.grad = grads["expert"]
        torch.optim.Muon([leaf], **MUON).step()
        assert torch.equal(fs.gather(shards, plan, mesh)["expert"], leaf)

    fs.simulate(main, 2)


def test_state_is_momentum_of_matrices_and_adamws_of_the_rest() -> None:
    params = example(0, EVEN)
    plan = fs.make_plan(params, 2, units=["blocks.*"])
    sizes = {path: leaf.numel() for path, leaf in named(params).items()}
    matrices = sum(numel for path, numel in sizes.items() if path.startswith("blocks.") and not path.endswith(".b"))

    def main(mesh: fs.Mesh) -> tuple[int, int]:
        optimizer = fs.muon(plan, mesh, matrices=["blocks.*"])
        shards = fs.shard(params, plan, mesh)
        _, state = optimizer.step(fs.shard(example(1, EVEN), plan, mesh), optimizer.init(shards), shards)
        averages = [own["exp_avg"] for each in state["adamw"]["leaves"].values() for own in each.values()]
        return sum(leaf.numel() for leaf in tree.leaves(state["momentum"])), sum(leaf.numel() for leaf in averages)

    counts = fs.simulate(main, 2)
    assert sum(momentum for momentum, _ in counts) == matrices
    assert sum(average for _, average in counts) == sum(sizes.values()) - matrices


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lr": -1.0}, ValueError, "lr must be a finite number, at least 0; found -1.0: pass"),
        ({"lamb": 1.0}, TypeError, "lamb"),
    ],
    ids=["lr", "unknown"],
)
def test_options_that_do_not_fit_are_refused(options: dict, error: Any, words: str) -> None:
    plan = fs.make_plan(example(0, ODD), 1)
    with pytest.raises(error, match=words):
        fs.muon(plan, fs.Mesh(), **options)


@pytest.mark.parametrize("nesterov", [True, False])
def test_what_has_no_gradient_stays_as_it_is_as_in_torch(nesterov: bool) -> None:
    params = {"a": torch.randn(6, 4), "b": torch.randn(4, 4), "v": torch.randn(5), "n": torch.randn(3)}
    gradients = {name: torch.randn_like(leaf) for name, leaf in params.items()}
    whole = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    options = {**MUON, "nesterov": nesterov}
    muon = torch.optim.Muon([whole["a"], whole["b"]], **options)
    adamw = torch.optim.AdamW([whole["v"], whole["n"]], **ADAMW)
    without = [("b", "n"), ("a", "b", "n"), (), ("a", "v")]
    for absent in without:
        for name, leaf in whole.items():
            leaf.grad = None if name in absent else gradients[name].clone()
        muon.step()
        adamw.step()

    def main(mesh: fs.Mesh) -> dict[str, torch.Tensor]:
        plan = fs.make_plan(params, mesh, units=list(params))
        optimizer = fs.muon(plan, mesh, adamw=ADAMW, **options)
        shards = fs.shard(params, plan, mesh)
        state = optimizer.init(shards)
        for absent in without:
            grads = fs.shard(gradients, plan, mesh)
            grads = {unit: dict.fromkeys(flat, None) if unit in absent else flat for unit, flat in grads.items()}
            with fs.record_events() as events:
                shards, state = optimizer.step(grads, state, shards)
            assert tuple(events) == optimizer.step.owners.events
        return fs.gather(shards, plan, mesh)

    for result in fs.simulate(main, 2):
        assert equal(result, {name: leaf.detach() for name, leaf in whole.items()})
