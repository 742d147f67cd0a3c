"""Traced steps of models with model axes, collectives of the user's, checkpoints and odd leaves.

promises/test_tensor_parallel.py traces the collectives of DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchopt
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard._utils.torch_private import recording_graph
from tests.comm.test_user_collectives import EIGHT_BITS, add
from tests.graph.test_traced import same, steps_on
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from Dynamo
WIDTH, STEPS = 6, 2
FIRST = {"units": ["0"]}
Tensor = torch.Tensor


def batch_of(mesh: fs.Mesh, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * mesh.rank + step))


def linear(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, width)


# --- models ---------------------------------------------------------------------------------------


class OneAxis(nn.Module):
    """A model that uses every collective along a model axis: tensors, experts and contexts in one."""

    def __init__(self, mesh: fs.Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.up, self.down = linear(3), nn.Linear(3, WIDTH, bias=False)
        self.expert, self.key, self.last = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        along: Any = {"mesh": self.mesh, "axis": "model"}
        x = x + fs.psum(self.down(torch.tanh(self.up(x))).T, **along).T
        sent = fs.all_to_all(x, **along, tiled=True)
        x = x + fs.all_to_all(torch.tanh(self.expert(sent)), **along, tiled=True)
        keys = self.key(x)
        x = torch.tanh(x * keys) + torch.tanh(x * fs.ppermute(keys, perm=[(0, 1), (1, 0)], **along))
        mean, top = fs.pmean(x.mean(), **along), fs.pmax(x.amax(), **along)
        every = fs.all_gather(x.mean(0), **along).sum(0)
        part = fs.psum_scatter(x.mean(0).repeat(2), **along, tiled=True)
        count = fs.psum(torch.tensor(float(len(x))), **along)  # a constant here, and none after the sum
        found: Tensor = self.last(x * mean / count + top + every + part)
        return found


class Adapted(nn.Module):
    """A frozen linear layer plus the product of two thin ones, a scalar, a plain tensor, and leaves of other dtypes."""

    def __init__(self, mesh: fs.Mesh) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0))
        self.low, self.wide = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16)), linear().double()
        self.tables = {"row": torch.linspace(0.0, 1.0, WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x) + self.b(self.a(x)) * self.scale + self.none.sum() + self.low.float() + self.tables["row"]
        return self.wide(x.double()).float()


class Tied(nn.Module):
    def __init__(self, mesh: fs.Mesh) -> None:
        super().__init__()
        self.first, self.middle, self.last = linear(), nn.Sequential(linear(), Adapted(mesh)), linear()
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.middle(self.first(x)))
        return found


class Recomputed(nn.Module):
    """A model of which backward computes each layer again, in three ways, the last one twice."""

    def __init__(self, mesh: fs.Mesh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = ((lambda x, f=f: torch.tanh(f(x))) for f in self.layers)
        x = x + F.dropout(fs.remat(lambda x: F.dropout(first(x), 0.5))(x), 0.5)

        def attend(x: Tensor) -> Tensor:
            heads = second(x)[None, None]
            return F.scaled_dot_product_attention(heads, heads, heads)[0, 0]

        x = x + checkpoint(attend, x, use_reentrant=False)
        for _ in range(2):
            x = x + checkpoint(third, x, use_reentrant=False, preserve_rng_state=False)
        return x


def plain(mesh: fs.Mesh) -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(WIDTH), linear())


# --- steps ----------------------------------------------------------------------------------------


def loss_of(out: Tensor, x: Any) -> Tensor:
    return (out - 0.5).square().mean()


def made(
    mesh: fs.Mesh,
    model: Callable[[fs.Mesh], nn.Module] = plain,
    *,
    plan: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    sharded: dict[str, Any] | None = None,
    ignored: tuple[str, ...] = (),
    call: Callable[..., Any] = lambda f, x: f(x),
    loss: Callable[[Any, Any], Any] = loss_of,
    weight: Callable[[fs.Mesh, Any], float] | None = None,
    mutable: bool = False,
    optimizer: Callable[[], Any] = lambda: fs.torch_optimizer(torch.optim.SGD, lr=0.1),
    **options: Any,
) -> tuple[Any, fs.TrainState]:
    """Return the step of a model, and its first state; ``options`` are those of the step."""
    for axis, functions in (own or {}).items():
        mesh = fs.with_collectives(mesh, axis, **functions)
    torch.manual_seed(0)
    apply, params, buffers = fs.make_functional(model(mesh), mutable=mutable)
    buffers |= {name: params.pop(name) + mesh.rank for name in ignored}
    cut = fs.make_plan(params, mesh, **(plan or {}))
    f = fs.fully_shard(apply, cut, mesh, ignored_params=ignored, **(sharded or {}))

    def loss_fn(shards: Any, buffers: Any, x: Any) -> Any:
        out, new = call(functools.partial(f, shards, buffers), x), ()
        if mutable:
            out, *new = out
        found = loss(out, x)
        results = (*(found if isinstance(found, tuple) else (found,)), *([weight(mesh, x)] if weight else ()), *new)
        return results if len(results) > 1 else found

    step = fs.make_train_step(loss_fn, optimizer(), cut, mesh, weighted=weight is not None, mutable=mutable, **options)
    return step, step.init(fs.shard(params, cut, mesh), buffers)


def run(mesh: fs.Mesh, batches: list[Any], *, traced: bool, warm: bool = False, **options: Any) -> Any:
    """Take a step for each batch; return what ``steps_on`` does, and the step."""
    step, state = made(mesh, **options)
    if warm:
        step(fs.copy(state), batches[0])
    take = fs.trace(step, state, batches[0]) if traced else step
    return *steps_on(batches, take, state), take


def check_traced(mesh: fs.Mesh, batches: list[Any], **options: Any) -> Any:
    (*eager, _), (*recorded, step) = (run(mesh, batches, traced=traced, **options) for traced in (False, True))
    assert same(recorded, eager)
    assert list(step.events) == eager[2][-1]
    assert bool(eager[2][-1]) == (mesh.world_size > 1)
    return step


def compiler(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as torch.compile does: one that cannot run while a graph is recorded."""

    def compiled(*args: Any, **kwargs: Any) -> Any:
        assert not recording_graph()
        return f(*args, **kwargs)

    return compiled


def chained() -> Any:
    transform = torchopt.transform
    rate = transform.scale_by_schedule(lambda count: -0.01 / (1 + count))
    return torchopt.chain(transform.add_decayed_weights(0.1), transform.scale_by_adam(), rate)


def in_autocast(f: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return f(x)


CUTS = {"up": {"model": 0}, "down.weight": {"model": 1}, "expert": "model"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a model axis": ({"model": 2}, {"model": OneAxis, "plan": {"units": ["up", "expert"], "local": CUTS}}),
    "collectives of the user's, eight bits": (2, {"own": {"shard": EIGHT_BITS}, "plan": FIRST}),
    "leaves of one rank, weights": (2, {
        "plan": {**FIRST, "local": {"0.*": "shard"}}, "weight": lambda mesh, _: mesh.rank + 1.0,
    }),
    "checkpoints of torch and of ours": (2, {"model": Recomputed, "plan": {"units": ["layers.*"]}}),
    "collectives of the user's, all-reduce": ({"replicate": 2}, {"own": {"replicate": {"all_reduce": add}}, "plan": FIRST}),
    "parameters outside the plan, hooks, aux, autocast": (2, {
        "ignored": ("2.weight", "2.bias"), "plan": FIRST, "has_aux": True, "call": in_autocast,
        "loss": lambda out, x: (loss_of(out, x), {"largest": out.amax()}),
        "on_grads": lambda unit, grads: {name: grad.clamp(-0.1, 0.1) for name, grad in grads.items()},
    }),
    "compiled units, compiled loss": (1, {
        "sharded": {"compiler": compiler}, "plan": FIRST,
        "loss": lambda out, x: torch.compile(loss_of, backend="eager")(out, x),
    }),
    "a chain of TorchOpt with a schedule": (1, {"optimizer": chained, "plan": FIRST}),
    # torch's tensors without data have other strides behind softplus_backward than those with data.
    "a kernel whose result has other strides than in the recording": (1, {
        "model": lambda mesh: nn.Sequential(linear(), nn.Softplus()), "call": lambda f, x: f(x.view(2, 2, WIDTH)),
        "loss": lambda out, x: (torch.ones(2, WIDTH, 2) * out.mT).square().mean(), "plan": FIRST,
    }),
    "nested, tied over units, frozen, dtypes, empty": (2, {
        "model": Tied, "plan": {"units": [["first", "last"], "middle", "middle.0"]},
    }),
}  # fmt: skip


@pytest.mark.nightly(one_in=4)
@pytest.mark.parametrize(("world", "options"), CASES.values(), ids=CASES)
@on_ranks()
def test_a_traced_step_has_the_bits_and_the_collectives_of_the_step(mesh: fs.Mesh, world: Any, options: Any) -> None:
    check_traced(mesh, [batch_of(mesh, number) for number in range(STEPS)], **options)
