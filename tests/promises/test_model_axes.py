"""Training on meshes with model axes equals training the unsharded model, in float64.

``Net`` has every kind of leaf: equal on all ranks, local along the tensor axis with and without a
cut, local along two model axes, frozen, tied, and in a unit that is not sharded. Ranks along
``tensor`` compute parts of one function and see one batch. Ranks along ``expert`` see batches of
their own, have a leaf of their own, and share the mean of their outputs. ``whole_losses`` computes
the losses of all ranks in one process, from the whole tensors.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module

WIDTH, HIDDEN, SAMPLES = 4, 6, 4
MESHES = {
    "2 replicate, 2 shard, 2 tensor": {"replicate": 2, "shard": 2, "tensor": 2},
    "2 shard, 2 tensor, 2 expert": {"shard": 2, "tensor": 2, "expert": 2},
    "2 tensor, 2 shard": {"tensor": 2, "shard": 2},
    "3 tensor": {"tensor": 3},
    "2 expert, 2 replicate": {"expert": 2, "replicate": 2},
}
CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "fixed": 0}  # along tensor
FROZEN = ("fixed", "frozen.weight")


def sizes_of(mesh: fs.Mesh | dict[str, int]) -> dict[str, int]:
    return {"replicate": 1, "shard": 1, "tensor": 1, "expert": 1, **(mesh if isinstance(mesh, dict) else mesh.shape)}


class Net(nn.Module):
    """One rank's part of the model, for a tensor axis of ``ranks`` ranks."""

    def __init__(self, ranks: int, mesh: fs.Mesh | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN // ranks), nn.Linear(HIDDEN // ranks, WIDTH, bias=False)
        self.gain, self.mix = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.fixed = nn.Parameter(torch.ones(HIDDEN // ranks), requires_grad=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        over = lambda f, y, axis: f(y, self.mesh, axis=axis) if self.mesh and axis in self.mesh.shape else y  # noqa: E731
        h = self.norm(self.first(x))
        h = h + self.frozen(h)
        parts = self.down(torch.tanh(self.up(h)) * self.fixed) * self.gain + torch.tanh(h * self.mix)
        y = over(fs.psum, parts, "tensor")
        return self.last(h + y * over(fs.pmean, y.mean(), "expert"))


@functools.cache
def whole_params(mesh: tuple[tuple[str, int], ...]) -> dict[str, torch.Tensor]:
    """Return the whole tensors: a leaf that is local without a cut has a dim for each of its axes."""
    sizes, g = dict(mesh), torch.Generator().manual_seed(0)
    shapes = {name: tuple(p.shape) for name, p in Net(1).named_parameters()}
    shapes |= {"gain": (sizes["tensor"], WIDTH), "mix": (sizes["tensor"], sizes["expert"], WIDTH)}
    # Why by way of float32: a model in float32 holds the same numbers.
    return {name: 0.5 * torch.randn(shape, generator=g).double() for name, shape in shapes.items()}


def own_part(name: str, value: torch.Tensor, at: dict[str, int], sizes: dict[str, int]) -> torch.Tensor:
    """Return the part of a whole tensor, or of its gradient, that a rank at a position holds."""
    if name in CUTS:
        return value.chunk(sizes["tensor"], CUTS[name])[at["tensor"]]
    if name == "gain":
        return value[at["tensor"]]
    return value[at["tensor"], at["expert"]] if name == "mix" else value


def batch_of(at: dict[str, int], step: int = 0) -> torch.Tensor:
    """Return the batch of a rank: the ranks along the tensor axis have the same one."""
    seed = 1000 * step + 100 * at["replicate"] + 10 * at["shard"] + at["expert"]
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out - 0.3).square().mean()


def whole_losses(params: dict[str, torch.Tensor], sizes: dict[str, int], batch: Any) -> dict[tuple[int, int, int], Any]:
    """Return the losses by the indices along replicate, shard and expert, computed from the whole tensors.

    ``batch(at)`` returns the batch of a rank.
    """
    p, losses = params, {}
    for replicate in range(sizes["replicate"]):
        for shard in range(sizes["shard"]):
            hs, ys = [], []
            for expert in range(sizes["expert"]):
                x = batch({"replicate": replicate, "shard": shard, "expert": expert, "tensor": 0})
                h = nn.functional.layer_norm(
                    x @ p["first.weight"].T + p["first.bias"], (WIDTH,), p["norm.weight"], p["norm.bias"]
                )
                h = h + h @ p["frozen.weight"].T
                inner = torch.tanh(h @ p["up.weight"].T + p["up.bias"]) * p["fixed"]
                parts = zip(inner.chunk(sizes["tensor"], -1), p["down.weight"].chunk(sizes["tensor"], 1), strict=True)
                y = sum((a @ b.T) * gain for (a, b), gain in zip(parts, p["gain"], strict=True))
                hs.append(h)
                ys.append(y + torch.tanh(h[..., None, :] * p["mix"][:, expert]).sum(-2))
            mean = sum(y.mean() for y in ys) / len(ys)
            for expert, (h, y) in enumerate(zip(hs, ys, strict=True)):
                losses[replicate, shard, expert] = loss_of((h + y * mean) @ p["first.weight"].T + p["last.bias"])
    return losses


def whole_gradient(sizes: dict[str, int], batch: Any, weight: Any = None) -> tuple[dict[Any, Any], dict[str, torch.Tensor]]:
    """Return the losses, and the gradient of their mean over all ranks; with weights the weighted mean."""
    params = {name: p.clone().requires_grad_() for name, p in whole_params(tuple(sizes.items())).items()}
    losses = whole_losses(params, sizes, batch)
    weights = {key: 1.0 if weight is None else weight(*key) for key in losses}
    total = sum(weights[key] * losses[key] for key in losses) / sum(weights.values())
    grads = torch.autograd.grad(total, list(params.values()), allow_unused=True)
    values = {key: loss.detach() for key, loss in losses.items()}
    return values | {"mean": total.detach()}, dict(zip(params, grads, strict=True))


class Setup:
    def __init__(
        self, mesh: fs.Mesh, *, strategy: str = "full_shard", remat: Any = (), schedule: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float64, **options: Any,
    ) -> None:  # fmt: skip
        self.mesh, self.sizes = mesh, sizes_of(mesh)
        self.at = {"tensor": 0, "expert": 0, **mesh.position}
        net = Net(self.sizes["tensor"], mesh).to(dtype)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(own_part(name, whole_params(tuple(self.sizes.items()))[name], self.at, self.sizes))
        along = [axis for axis in ("tensor", "expert") if axis in mesh.shape]
        local: dict[str, Any] = {}
        if "tensor" in along:
            local = {name: {"tensor": dim} for name, dim in CUTS.items()} | {"gain": "tensor"}
        units = fs.wrap.any_of(
            fs.wrap.by_function(lambda m: {"strategy": "no_shard"} if isinstance(m, nn.LayerNorm) else False),
            fs.wrap.by_function(lambda m: m in (net.first, net.up, net.down)),
        )(net)
        options |= {"strategy": strategy, "local": local | {"mix": along}}
        how = {"remat": remat}
        self.plan, self.sharded, self.shards = of_module(mesh, net, units, schedule=schedule, how=how, **options)
        self.x = batch_of(self.at)

    def loss(self, shards: Any, x: torch.Tensor) -> torch.Tensor:
        return loss_of(self.sharded(shards, {}, x))

    def key(self) -> tuple[int, int, int]:
        return self.at["replicate"], self.at["shard"], self.at["expert"]

    def check(self, grads: Any, wanted: dict[str, torch.Tensor]) -> None:
        """Compare this rank's gradients with its slices of the whole ones; frozen leaves have none."""
        for unit in self.plan.unit_list:
            for buffer in unit.buffers:
                grad = grads[unit.name][buffer.key]
                assert (grad is None) == (not buffer.trainable)
                for leaf in buffer.leaves if grad is not None else ():
                    part = buffer.part(leaf, self.at["shard"])
                    whole = own_part(leaf.path, wanted[leaf.path], self.at, self.sizes)
                    close(grad[part.in_shard], whole.flatten()[part.begin : part.end])


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


PRECISE = fs.MixedPrecision(param_dtype=torch.float64, reduce_dtype=torch.float64, keep_low_precision_grads=True)
PLANS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "no_shard": {"strategy": "no_shard"},
    "remat": {"remat": ["up", "down", "norm"]},
    "buckets": {"bucket_bytes": 10**6},
    "precision": {"precision": PRECISE, "dtype": torch.float32},
    "no prefetch": {"schedule": {"forward_prefetch": False, "backward_prefetch": None}},
    "prefetch after": {"schedule": {"backward_prefetch": "post"}},
}


GRID, WIDE, *SMALL = MESHES


def weight_of(replicate: int, shard: int, expert: int) -> float:
    return 1.0 + replicate + 2 * shard + 4 * expert


# A mesh, options of the plan, how micro-batches are reduced if there are two of them, and whether losses have weights.
GRADIENTS = [
    *((WIDE, options, None, False) for options in PLANS),
    *((world, "full_shard", None, False) for world in (GRID, *SMALL)),
    (GRID, "no_shard", None, False),
    (WIDE, "full_shard", "each", False),
    (GRID, "full_shard", "once", False),
    (WIDE, "full_shard", None, True),
    (GRID, "full_shard", "each", True),
]


@pytest.mark.nightly(one_in=6)
@pytest.mark.parametrize(("world", "options", "reduce", "weighted"), GRADIENTS)
def test_the_gradient_is_that_of_the_unsharded_model(world: str, options: str, reduce: Any, weighted: bool) -> None:
    sizes, number = sizes_of(MESHES[world]), 2 if reduce else 1
    batches = [lambda at, i=i: batch_of(at).chunk(number)[i] for i in range(number)]
    parts = [whole_gradient(sizes, batch, weight_of if weighted else None) for batch in batches]
    mean = sum(losses["mean"] for losses, _ in parts) / number
    wanted = {name: None if g is None else sum(part[name] for _, part in parts) / number for name, g in parts[0][1].items()}

    def main(mesh: fs.Mesh) -> None:
        setup = Setup(mesh, **PLANS[options])
        own = weight_of(*setup.key())
        loss_fn = (lambda s, x: (setup.loss(s, x), own)) if weighted else setup.loss
        micro = {"micro_batches": 2, "reduce": reduce} if reduce else {}
        evaluate = functools.partial(fs.accumulate, **micro) if reduce else fs.value_and_grad
        with fs.record_events() as events:
            loss, grads = evaluate(loss_fn, weighted=weighted)(setup.shards, setup.x)
        setup.check(grads, wanted)
        if weighted:
            close(loss[0], mean)
            assert loss[1] == number * sizes["tensor"] * sum(weight_of(*key) for key in parts[0][0] if key != "mean")
        else:
            close(loss, sum(losses[setup.key()] for losses, _ in parts) / number)
        recomputed = PLANS[options].get("remat", ())
        predicted = fs.predict_events(
            setup.plan, setup.sharded.schedule, recomputed=recomputed, not_saved=["first"],
            accumulate=fs.Accumulation(**micro),
        )  # fmt: skip
        assert tuple(event for event in events if event.unit is not None) == predicted
        assert {event.axis for event in events if event.unit is None} <= (
            {"tensor", "expert"} if not weighted else set(mesh.shape)
        )

    fs.simulate(main, MESHES[world])


def reference_steps(sizes: dict[str, int], max_norm: float) -> tuple[list[float], list[float], dict]:
    """Train the whole tensors for 3 steps; return losses, norms of gradients and the tensors."""
    params = {name: p.clone().requires_grad_() for name, p in whole_params(tuple(sizes.items())).items()}
    trained = {name: p for name, p in params.items() if name not in FROZEN}
    optimizer, losses, norms = torch.optim.AdamW(trained.values(), lr=0.05), [], []
    for step in range(3):
        each = whole_losses(params, sizes, lambda at, step=step: batch_of(at, step))
        loss = sum(each.values()) / len(each)
        for p, grad in zip(trained.values(), torch.autograd.grad(loss, list(trained.values())), strict=True):
            p.grad = grad
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), max_norm).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, params


@pytest.mark.slow
def test_three_scaled_and_clipped_steps_are_those_of_the_unsharded_model() -> None:
    def main(mesh: fs.Mesh) -> Any:
        setup = Setup(mesh)
        step = fs.make_train_step(
            lambda shards, buffers, x: setup.loss(shards, x),
            fs.torch_optimizer(torch.optim.AdamW, lr=0.05), setup.plan, mesh,
            max_norm=0.05, scaler=fs.GradScaler(init_scale=1024.0),
        )  # fmt: skip
        state, seen = step.init(setup.shards, {}), []
        for number in range(3):
            state, metrics = step(state, batch_of(setup.at, number))
            seen.append((metrics["loss"].item(), metrics["grad_norm"].item()))
        return seen, fs.gather(state.shards, setup.plan, mesh), setup.at

    sizes = sizes_of(MESHES[WIDE])
    losses, norms, params = reference_steps(sizes, 0.05)
    assert min(norms) > 0.05
    for seen, own, at in fs.simulate(main, MESHES[WIDE]):
        close(seen, list(zip(losses, norms, strict=True)))
        for name, value in own.items():
            close(value, own_part(name, params[name].detach(), at, sizes))


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize(
    ("world", "strategy", "norm_type"), [(GRID, "full_shard", 2.0), (WIDE, "no_shard", 1.0), (WIDE, "full_shard", math.inf)]
)
def test_the_global_norm_counts_each_element_of_the_whole_gradient_once(world: str, strategy: str, norm_type: float) -> None:
    _, grads = whole_gradient(sizes_of(MESHES[world]), batch_of)
    elements = torch.cat([grad.flatten() for name, grad in grads.items() if name not in FROZEN])

    def main(mesh: fs.Mesh) -> torch.Tensor:
        setup = Setup(mesh, strategy=strategy)
        _, found = fs.value_and_grad(setup.loss)(setup.shards, setup.x)
        return fs.global_norm(found, setup.plan, mesh, norm_type)

    for norm in fs.simulate(main, MESHES[world]):
        close(norm, torch.linalg.vector_norm(elements, norm_type))
