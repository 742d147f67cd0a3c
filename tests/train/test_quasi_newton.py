"""L-BFGS on shards takes the steps of ``torch.optim.LBFGS`` on the whole model."""

import math

import pytest
import torch

import funcshard as fs
from tests.core.units import of_module
from tests.models import SUBJECTS, cast, part
from tests.ranks import run_ranks, run_simulated

BATCH = cast(SUBJECTS["mlp"].make_batch(12, 0), torch.float64)
LONG = {"max_iter": 12, "history_size": 4}
CASES = {
    "full_shard": (run_simulated, {"shard": 3}, {}, LONG),
    "on processes": (run_ranks, {"shard": 2}, {}, LONG),
    "hybrid": (run_simulated, {"replicate": 2, "shard": 2}, {}, {"max_iter": 3}),
    "copies": (run_simulated, {"shard": 2}, {"strategy": "no_shard"}, LONG),
    "one unit, without a search": (
        run_simulated,
        {"shard": 4},
        {"units": []},
        {"max_iter": 5, "line_search_fn": None, "lr": 0.1},
    ),
    "at the minimum": (run_simulated, {"shard": 2}, {}, {"tolerance_grad": 1e9}),
    "until no change": (run_simulated, {"shard": 2}, {}, {"tolerance_change": 1e-3, "max_iter": 100}),
    "few gradients": (run_simulated, {"shard": 2}, {}, {"max_iter": 50, "max_eval": 7}),
}


def model():
    module = SUBJECTS["mlp"].build().double()
    module.head.bias.requires_grad_(False)
    return module


def on_shards(mesh, plan_options, options):
    plan, run, shards = of_module(mesh, model(), **{"units": ["layers.0", "layers.3"], **plan_options})
    before, own = fs.gather(shards, plan, mesh), part(BATCH, mesh.rank, mesh.world_size)
    loss_fn = lambda s: SUBJECTS["mlp"].loss(run(s, {}, **own["inputs"]), own)  # noqa: E731
    best, info = fs.lbfgs(loss_fn, shards, plan, mesh, **options)
    torch.testing.assert_close(fs.gather(shards, plan, mesh), before, rtol=0, atol=0)
    assert all(x.grad_fn is None and not x.requires_grad for unit in best.values() for x in unit.values())
    return fs.gather(best, plan, mesh), info


def whole(options):
    """Return the parameters that torch's optimizer reaches, and its counts."""
    module = model()
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(trainable, **{"line_search_fn": "strong_wolfe", **options})

    def closure():
        optimizer.zero_grad()
        loss = SUBJECTS["mlp"].loss(module(**BATCH["inputs"]), BATCH)
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state[trainable[0]]
    return dict(module.named_parameters()), {key: state[key] for key in ("n_iter", "func_evals")}


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize(("run", "shape", "plan_options", "options"), CASES.values(), ids=CASES)
def test_the_steps_are_those_of_torch_on_the_whole_model(run, shape, plan_options, options):
    expected, counts = whole(options)
    for params, info in run(on_shards, math.prod(shape.values()), plan_options, options, shape=shape):
        assert info == counts
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value.detach(), rtol=1e-10, atol=1e-10)


def test_a_loss_of_a_few_numbers_that_no_rank_has_all_of_is_minimised():
    def main(mesh):
        params = {"w": torch.ones(2), "b": torch.ones(1, dtype=torch.float64), "unused": torch.ones(1)}
        plan = fs.make_plan(params, mesh)
        f = fs.unshard(
            lambda p: (p["w"].sum() - p["b"]).square().sum() + (mesh.rank - p["b"]).square().sum(), plan.units[""], mesh
        )
        shards, _ = fs.lbfgs(lambda s: f(s[""]), fs.shard(params, plan, mesh), plan, mesh)
        return fs.gather(shards, plan, mesh)

    for params in fs.simulate(main, world_size=3):
        torch.testing.assert_close((params["w"].sum(), params["b"].item()), (torch.tensor(1.0), 1.0), rtol=1e-3, atol=1e-3)
        assert (params["unused"].item(), params["w"].dtype) == (1, torch.float32)
