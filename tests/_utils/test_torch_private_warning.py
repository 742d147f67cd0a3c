"""``torch.compile`` around a step or a sharded function says once what to use, and changes nothing."""

import re
import warnings

import pytest
import torch
from torch import nn

import funcshard as fs

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch crashes when a second thread compiles")
BATCH = torch.linspace(-1, 1, 12).view(4, 3)
WAYS = {
    "step": r"nothing of a training step.*fs\.trace\(step, state, batch\)\.compile\(\).*fully_shard\(compiler=",
    "traced": r"nothing of a traced step.*traced\.compile\(\)",
    "sharded": r"nothing of a function of fully_shard.*units with fully_shard\(compiler=torch\.compile\).*fs\.trace",
    "loss function": r"nothing of a function of fully_shard",
}
GRADIENTS = {
    "value_and_grad": lambda loss_fn, mesh: fs.value_and_grad(loss_fn, mesh=mesh),
    "accumulate": lambda loss_fn, mesh: fs.accumulate(loss_fn, micro_batches=2, mesh=mesh),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(mesh, way="", units=None, steps=2, **options):
    """Take steps, of which one part is compiled; return the losses and the last shards."""
    compile = lambda name, f: torch.compile(f, backend="eager", **options) if name == way else f  # noqa: E731
    torch.manual_seed(0)
    apply, params, buffers = fs.make_functional(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
    plan = fs.make_plan(params, mesh, units=["0"])
    sharded = compile("sharded", fs.fully_shard(apply, plan, mesh, compiler=units))
    loss_fn = compile("loss function", lambda shards, buffers, x: sharded(shards, buffers, x).square().mean())
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=0.1), plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    take = compile("traced", fs.trace(step, state, BATCH)) if way == "traced" else compile("step", step)
    losses = []
    for _ in range(steps):
        state, metrics = take(state, BATCH)
        losses.append(metrics["loss"])
    return losses, fs.copy(state.shards)


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("way", WAYS)
def test_it_warns_once_for_each_line_and_changes_no_bit(way):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        found = fs.simulate(lambda mesh: run(mesh, way), 1)
    (given,) = seen
    assert (given.category, given.filename) == (UserWarning, __file__)
    assert re.search(WAYS[way], str(given.message))
    torch.testing.assert_close(found, fs.simulate(run, 1), rtol=0, atol=0)


@pytest.mark.slow
def test_where_the_program_has_to_be_one_graph_torchs_error_says_the_same():
    with pytest.raises(Exception, match=f"(?s)reason: torch.compile compiles {WAYS['step']}"):
        fs.simulate(lambda mesh: run(mesh, "step", fullgraph=True), 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_function_whose_units_are_compiled_says_nothing():
    units = lambda f: torch.compile(f, backend="eager")  # noqa: E731
    fs.simulate(lambda mesh: run(mesh, "loss function", units), 1)  # warnings are errors here


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_compiled_function_of_gradients_says_so_as_well(name):
    words = r"nothing of a function of value_and_grad or accumulate.*fully_shard\(compiler=.*fs\.trace\(step, state, batch\)"

    def main(mesh):
        apply, params, buffers = fs.make_functional(nn.Linear(3, 1))
        plan = fs.make_plan(params, mesh)
        sharded = fs.fully_shard(apply, plan, mesh)
        plain = GRADIENTS[name](lambda shards, x: sharded(shards, buffers, x).square().mean(), mesh)
        compiled = torch.compile(plain, backend="eager")
        shards = fs.shard(params, plan, mesh)
        return [plain(shards, BATCH), *(compiled(shards, BATCH) for _ in range(2))]

    with pytest.warns(UserWarning, match=words) as seen:
        ((plain, *compiled),) = fs.simulate(main, 1)
    assert {each.filename for each in seen} == {__file__}
    torch.testing.assert_close(compiled, [plain, plain], rtol=0, atol=0)
