"""Loss scaling equals torch.amp.GradScaler on the whole model: scales, skips and parameters."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import run_ranks, run_simulated

INF = float("inf")
SCALING = {"init_scale": 2.0**10, "growth_interval": 2}
# Step -> (rank, value): the rank that has an infinity or NaN in that step. In a world of one it is
# rank 0.
BAD = {1: (1, INF), 4: (0, INF), 5: (1, float("nan"))}
STEPS = 8
TAKEN = [step not in BAD for step in range(STEPS)]
# The scale grows after two good steps.
SCALES = [2.0**power for power in (10, 10, 9, 9, 10, 9, 8, 8)]
HALF = fs.MixedPrecision(torch.float16, reduce_dtype=torch.float32)
KEPT = fs.MixedPrecision(torch.float16, keep_low_precision_grads=True)


@dataclass(frozen=True)
class Case:
    """How a model is trained; ``exact`` if the whole model can add in the order of the ranks."""

    strategy: str = "full_shard"
    precision: fs.MixedPrecision | None = None
    micro: int = 1
    reduce: str = "each"
    weighted: bool = False
    offload: bool = False
    max_norm: float | None = None

    @property
    def exact(self) -> bool:
        return self.max_norm is None


CASES = {
    "full_shard": Case(),
    "shard_grad_op": Case("shard_grad_op"),
    "no_shard": Case("no_shard"),
    "float16": Case(precision=HALF),
    "float16 kept": Case(precision=KEPT),
    "float16 no_shard": Case("no_shard", precision=HALF),
    "each": Case(micro=2),
    "once": Case(micro=2, reduce="once", precision=HALF),
    "weighted": Case(weighted=True),
    "offload": Case(offload=True, precision=HALF),
    "clipped": Case(max_norm=0.05),
    "clipped once": Case(max_norm=0.05, micro=2, reduce="once"),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(step: int, rank: int, world: int, micro: int = 1) -> dict[str, torch.Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    bad, value = BAD.get(step, (0, 1.0))
    factor = torch.ones(8)
    factor[-8 // micro :] = value if rank == bad % world else 1.0  # in the last micro-batch
    return {"x": x, "factor": factor}


def loss_of(out: torch.Tensor, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    return out.float().square().mean() * rows["factor"].mean()


def weight_of(rank: int) -> float:
    return 1.0 + 2 * rank


def on_the_whole_model(case: Case, world: int) -> list[dict[str, Any]]:
    """Train with torch.amp.GradScaler, adding gradients in the order of the reduction."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", **SCALING)
    scaler.scale(torch.zeros(()))  # makes its state
    compute = torch.float16 if case.precision else torch.float32
    reduce = (case.precision and case.precision.reduce_dtype) or compute
    kept = reduce if case.precision and case.precision.keep_low_precision_grads else torch.float32
    weights = [weight_of(rank) if case.weighted else 1.0 for rank in range(world)]
    results = []
    for step in range(STEPS):
        found: dict[tuple[int, int], list[torch.Tensor]] = {}
        losses = []
        for rank in range(world):
            rows = batch(step, rank, world, case.micro)
            for m in range(case.micro):
                part = {key: value.chunk(case.micro)[m] for key, value in rows.items()}
                low = {name: p.detach().to(compute).requires_grad_() for name, p in net.named_parameters()}
                loss = loss_of(torch.func.functional_call(net, low, part["x"].to(compute)), part)
                scaled = scaler.scale(loss) * (weights[rank] / case.micro)
                found[rank, m] = [g.to(reduce) for g in torch.autograd.grad(scaled, list(low.values()))]
                losses.append(loss.detach() * weights[rank] / case.micro)
        for i, p in enumerate(net.parameters()):
            if case.reduce == "each":
                total = sum(sum(found[rank, m][i] for rank in range(world)) for m in range(case.micro))
            else:
                total = sum(sum(found[rank, m][i] for m in range(case.micro)) for rank in range(world))
            p.grad = (total.to(kept) / sum(weights)).float()
        used = scaler.get_scale()
        scaler.unscale_(optimizer)
        norm = None
        if case.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), case.max_norm)
        before = net[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        results.append(
            {
                "scale": used,
                "tracker": scaler._get_growth_tracker(),
                "taken": not torch.equal(before, net[0].weight),
                "loss": sum(losses) / sum(weights),
                "norm": norm,
                "params": {name: p.detach().clone() for name, p in net.named_parameters()},
            }
        )
    return results


def on_ranks(mesh: fs.Mesh, case: Case) -> list[dict[str, Any]]:
    net = model()
    apply, params, buffers = fs.make_functional(net)
    options = {"strategy": case.strategy, "precision": case.precision, "offload": case.offload}
    plan = fs.make_plan(params, mesh, units=["0", "2"], **options)
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, rows: Any) -> Any:
        loss = loss_of(sharded(shards, buffers, rows["x"]), rows)
        return (loss, weight_of(mesh.rank)) if case.weighted else loss

    step = fs.make_train_step(
        loss_fn,
        fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
        plan,
        mesh,
        scaler=fs.GradScaler(**SCALING),
        accumulate=case.micro,
        reduce=case.reduce,
        weighted=case.weighted,
        max_norm=case.max_norm,
    )
    state, results, taken = step.init(fs.shard(params, plan, mesh), buffers), [], 0
    for i in range(STEPS):
        state, metrics = step(state, batch(i, mesh.rank, mesh.world_size, case.micro))
        more = ["weight"] * case.weighted + ["grad_norm"] * (case.max_norm is not None)
        assert sorted(metrics) == sorted(["loss", "local_loss", "lr", "scale", "found_inf", *more])
        assert metrics["found_inf"].dtype == torch.bool
        taken += not metrics["found_inf"]
        assert state.step == taken
        results.append(
            {
                "scale": metrics["scale"].item(),
                "tracker": state.scaler.growth_tracker.item(),
                "taken": not metrics["found_inf"],
                "loss": metrics["loss"],
                "norm": metrics.get("grad_norm"),
                "params": {name: p.clone() for name, p in fs.gather(state.shards, plan, mesh).items()},
            }
        )
    return results


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], exact: bool) -> None:
    assert [r["taken"] for r in ours] == [r["taken"] for r in theirs] == TAKEN
    assert [r["scale"] for r in ours] == [r["scale"] for r in theirs] == SCALES
    assert [r["tracker"] for r in ours] == [r["tracker"] for r in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine["loss"], other["loss"], equal_nan=True)
        if other["norm"] is not None and mine["taken"]:
            torch.testing.assert_close(mine["norm"], other["norm"])
        for name, value in other["params"].items():
            if exact:
                assert torch.equal(mine["params"][name], value), name
            else:
                torch.testing.assert_close(mine["params"][name], value)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_step_is_that_of_torch_on_the_whole_model(case: Case, world: int) -> None:
    theirs = on_the_whole_model(case, world)
    for ours in run_simulated(on_ranks, world, case):
        compare(ours, theirs, case.exact)


@pytest.mark.slow
def test_real_ranks_skip_the_same_steps() -> None:
    case = CASES["float16"]
    theirs = on_the_whole_model(case, 2)
    for ours in run_ranks(on_ranks, 2, case):
        compare(ours, theirs, case.exact)


def test_an_infinity_in_one_ranks_own_leaves_stops_every_rank() -> None:
    """Gradients of local leaves are not reduced, so other ranks have to be told."""
    shared = torch.linspace(-1, 1, 12).reshape(4, 3)

    def forward(leaves: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        # The factor multiplies only the gradient of this rank's expert.
        return (x @ leaves["shared"]["w"]).tanh() @ _Times.apply(leaves["expert"]["w"], factor)

    def expert(rank: int) -> torch.Tensor:
        return torch.full((3, 2), (rank + 1) / 4)

    def inputs(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = batch(step, rank, 2)
        return rows["x"], rows["factor"].mean()

    def main(mesh: fs.Mesh) -> Any:
        params = {"shared": {"w": shared}, "expert": {"w": expert(mesh.rank)}}
        plan = fs.make_plan(params, mesh, local=["expert"])
        f = fs.unshard(forward, plan.units[""], mesh)
        seen = []

        def loss_fn(shards: Any, buffers: Any, rows: Any) -> torch.Tensor:
            return f(shards[""], *rows).square().mean()

        step = fs.make_train_step(
            loss_fn,
            fs.torch_optimizer(torch.optim.SGD, lr=0.1),
            plan,
            mesh,
            scaler=fs.GradScaler(**SCALING),
            max_norm=1e6,
        )
        state = step.init(fs.shard(params, plan, mesh), {})
        for i in range(STEPS):
            state, metrics = step(state, inputs(i, mesh.rank))
            seen.append((not metrics["found_inf"], metrics["scale"].item()))
        return seen, fs.gather(state.shards, plan, mesh)

    whole = [torch.nn.Parameter(p.clone()) for p in (shared, expert(0), expert(1))]
    optimizer, scaler = torch.optim.SGD(whole, lr=0.1), torch.amp.GradScaler("cpu", **SCALING)
    for i in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            leaves = {"shared": {"w": whole[0]}, "expert": {"w": whole[1 + rank]}}
            scaler.scale(forward(leaves, *inputs(i, rank)).square().mean()).backward()
        whole[0].grad /= 2
        scaler.step(optimizer)
        scaler.update()
    for rank, (seen, params) in enumerate(fs.simulate(main, 2)):
        assert seen == list(zip(TAKEN, SCALES, strict=True))
        assert torch.equal(params["shared"]["w"], whole[0])
        assert torch.equal(params["expert"]["w"], whole[1 + rank])


class _Times(torch.autograd.Function):
    """The identity, with its gradient multiplied by ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


@pytest.mark.slow
def test_buffers_advance_in_a_skipped_step() -> None:
    def norm_net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    net = norm_net()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", **SCALING)
    theirs = []
    for i in range(STEPS):
        optimizer.zero_grad()
        rows = batch(i, 0, 1)
        scaler.scale(loss_of(net(rows["x"]), rows)).backward()
        scaler.step(optimizer)
        scaler.update()
        theirs.append({name: value.clone() for name, value in net.named_buffers()})

    def main(mesh: fs.Mesh) -> None:
        apply, params, buffers = fs.make_functional(norm_net(), mutable=True)
        plan = fs.make_plan(params, mesh, units=["0", "1", "2"])
        sharded = fs.fully_shard(apply, plan, mesh)

        def loss_fn(shards: Any, buffers: Any, rows: Any) -> Any:
            out, new = sharded(shards, buffers, rows["x"])
            return loss_of(out, rows), new, {"rows": len(rows["x"])}

        step = fs.make_train_step(
            loss_fn,
            fs.torch_optimizer(torch.optim.SGD, lr=0.1),
            plan,
            mesh,
            scaler=fs.GradScaler(**SCALING),
            mutable=True,
            has_aux=True,
        )
        state = step.init(fs.shard(params, plan, mesh), buffers)
        for i in range(STEPS):
            # Every rank has the same batch, so the ranks compute what a single process computes.
            state, metrics = step(state, batch(i, 0, 1))
            assert bool(metrics["found_inf"]) is not TAKEN[i]
            assert metrics["aux"] == {"rows": 8}
            for name, value in theirs[i].items():
                assert torch.equal(state.buffers[name], value), (i, name)

    # As many threads as the reference has, so that the bits are equal.
    fs.simulate(main, 1, threads=None)
    fs.simulate(main, 2, threads=None)


def test_on_grads_sees_scaled_gradients() -> None:
    net, x = nn.Linear(3, 1), torch.ones(2, 3)
    apply, params, buffers = fs.make_functional(net)

    def main(mesh: fs.Mesh, scaler: fs.GradScaler | None) -> dict[str, torch.Tensor]:
        plan = fs.make_plan(params, mesh)
        sharded = fs.fully_shard(apply, plan, mesh)
        seen: dict[str, torch.Tensor] = {}
        step = fs.make_train_step(
            lambda s, b, x: sharded(s, b, x).square().mean(),
            fs.torch_optimizer(torch.optim.SGD, lr=0.1),
            plan,
            mesh,
            scaler=scaler,
            on_grads=lambda unit, grads: seen.update({path: grad.clone() for path, grad in grads.items()}),
        )
        step(step.init(fs.shard(params, plan, mesh), buffers), x)
        return seen

    for scaled, bare in fs.simulate(lambda mesh: (main(mesh, fs.GradScaler(64.0)), main(mesh, None)), 2):
        assert sorted(bare) == ["bias", "weight"]
        for path, grad in bare.items():
            assert torch.equal(scaled[path], grad * 64)


def test_a_step_without_data_leaves_the_scaling_as_it_was() -> None:
    net = nn.Linear(3, 1)
    apply, params, buffers = fs.make_functional(net)

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(params, mesh)
        sharded = fs.fully_shard(apply, plan, mesh)
        step = fs.make_train_step(
            lambda s, b, x: (sharded(s, b, x).square().mean(), 0),
            fs.torch_optimizer(torch.optim.SGD, lr=0.1),
            plan,
            mesh,
            scaler=fs.GradScaler(64.0, growth_interval=1),
            weighted=True,
        )
        state = step.init(fs.shard(params, plan, mesh), buffers)
        after, metrics = step(state, torch.full((2, 3), INF))
        assert not metrics["found_inf"]  # a batch of weight zero has no infinities
        assert after is state

    fs.simulate(main, 2, threads=None)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.floats(1.01, 100),
    st.floats(0.01, 0.99),
    st.integers(1, 4),
    st.floats(2.0**-40, 2.0**127, width=32),  # so that no scale shrinks to the smallest one, see below
)
def test_scales_are_torchs_to_the_bit(script: list[bool], growth: float, backoff: float, interval: int, init: float) -> None:
    scaler = fs.GradScaler(init, growth, backoff, interval)
    state = scaler.init(fs.Mesh())
    scale, tracker = torch.tensor(init), torch.zeros((), dtype=torch.int32)
    for bad in script:
        state = scaler.update(state, torch.tensor(bad))
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(bad)), growth, backoff, interval)
        assert torch.equal(state.scale, scale)
        assert torch.equal(state.growth_tracker, tracker)
    assert state.scale.dtype == torch.float32
    assert state.growth_tracker.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("scale", [2.0**16, 3.0, 2.0**-20])
def test_unscaling_is_torchs_and_changes_nothing_in_place(dtype: torch.dtype, scale: float) -> None:
    scaler = fs.GradScaler(scale)
    mesh = fs.Mesh()
    grads = {"a": torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype), "frozen": None}
    before = grads["a"].clone()
    found, found_inf = scaler.unscale(grads, scaler.init(mesh), mesh)
    assert torch.equal(grads["a"], before)
    assert found["frozen"] is None
    assert not found_inf
    assert found["a"].dtype == torch.promote_types(dtype, torch.float32)
    wanted = before.to(found["a"].dtype)
    if dtype.is_complex:
        wanted = wanted * torch.tensor(scale).double().reciprocal().float()
    else:
        inverse = torch.tensor(scale).double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_([wanted], torch.zeros(()), inverse)
    assert torch.equal(found["a"], wanted)


@pytest.mark.parametrize("value", [INF, -INF, float("nan")], ids=str)
@pytest.mark.parametrize("world", [1, 3, {"replicate": 2, "shard": 2}], ids=str)
def test_an_infinity_on_one_rank_is_found_on_every_rank(world: Any, value: float) -> None:
    def main(mesh: fs.Mesh) -> list[bool]:
        scaler, found = fs.GradScaler(), []
        for rank in range(mesh.world_size + 1):
            grads = {"a": {"float16": torch.ones(3).half()}, "b": {"float32": torch.ones(2)}}
            if rank == mesh.rank:
                grads["a"]["float16"][1] = value
            found.append(bool(scaler.unscale(grads, scaler.init(mesh), mesh)[1]))
        return found

    for found in fs.simulate(main, world):
        assert found == [True] * (len(found) - 1) + [False]


def test_the_state_is_a_part_of_the_pytree() -> None:
    scaler = fs.GradScaler(4.0)
    state = fs.TrainState({}, {}, {}, 0, scaler.init(fs.Mesh()))
    leaves, unflatten = tree.flatten(state)
    assert any(isinstance(leaf, torch.Tensor) and leaf.item() == 4.0 for leaf in leaves)
    assert type(unflatten(leaves).scaler) is type(state.scaler)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_loss_is_scaled_in_float32_or_wider(dtype: torch.dtype) -> None:
    scaler = fs.GradScaler(2.0**20)
    loss = torch.tensor(0.5, dtype=dtype, requires_grad=True)
    scaled = scaler.scale(loss, scaler.init(fs.Mesh()))
    assert scaled.item() == 2.0**19
    assert scaled.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"init_scale": 0.0},
            r"init_scale must be a finite number, at least 1\.17549e-38 and below 3\.40282e\+38; found 0\.0",
        ),
        ({"growth_factor": 1.0}, r"growth_factor must be a finite number above 1; found 1\.0: 2\.0 is usual"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be a finite number above 0 and below 1; found 1\.0"),
        ({"backoff_factor": 0.0}, r"backoff_factor must be a finite number above 0 and below 1; found 0\.0"),
        ({"init_scale": float("nan")}, r"init_scale must be a finite number.*; found nan"),
        ({"growth_interval": 0}, r"growth_interval must be a whole number of steps, at least 1; found 0"),
        ({"growth_interval": 1.5}, r"growth_interval must be a whole number of steps, at least 1; found 1\.5"),
    ],
    ids=["no scale", "no growth", "no backoff", "backoff to nothing", "nan", "interval 0", "interval 1.5"],
)
def test_a_scaler_that_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fs.GradScaler(**options)


def test_a_scale_never_shrinks_to_zero() -> None:
    # torch's does, after some 150 bad steps in a row; zero hides infinities and makes every gradient NaN.
    scaler, mesh = fs.GradScaler(8.0), fs.Mesh()
    state = scaler.init(mesh)
    for _ in range(200):
        state = scaler.update(state, torch.tensor(True))
    assert state.scale == torch.finfo(torch.float32).tiny
    loss = scaler.scale(torch.tensor(1.0, requires_grad=True), state)
    grads, found_inf = scaler.unscale({"w": loss.detach()}, state, mesh)
    assert grads["w"] == 1.0
    assert not found_inf


@pytest.mark.parametrize("scale", [0.0, INF, float("nan")], ids=str)
def test_a_scale_without_a_reciprocal_counts_as_an_infinity(scale: float) -> None:
    state = fs.ScalerState(torch.tensor(scale), torch.zeros((), dtype=torch.int32))
    _, found_inf = fs.GradScaler().unscale({"w": torch.zeros(2) * scale}, state, fs.Mesh())
    assert found_inf


def test_update_takes_a_truth_value_of_python_too() -> None:
    scaler = fs.GradScaler(8.0)
    assert scaler.update(scaler.init(fs.Mesh()), True) == scaler.update(scaler.init(fs.Mesh()), torch.tensor(True))


MISMATCHES: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no state": (
        fs.GradScaler(8.0),
        None,
        ValueError,
        r"made with a scaler, and the state holds none.*scaler=scaler\.init",
    ),
    "no scaler": (
        None,
        fs.GradScaler(8.0).init(fs.Mesh()),
        ValueError,
        r"no scaler, and the state holds one.*scaler=None\)",
    ),
    "numbers": (fs.GradScaler(8.0), fs.ScalerState(8.0, 0), TypeError, r"a ScalerState of tensors; found .*: make it with"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("scaler", "scaling", "error", "words"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_step_and_its_state_both_have_a_scaler_or_neither(
    scaler: Any, scaling: Any, error: type[Exception], words: str
) -> None:
    plan, mesh = fs.make_plan({"w": torch.ones(2)}, 1), fs.Mesh()
    shards = fs.shard({"w": torch.ones(2)}, plan, mesh)
    loss_fn = lambda shards, buffers, batch: shards[""]["float32"].sum()  # noqa: E731
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh, scaler=scaler)
    with pytest.raises(error, match=words):
        step(step.init(shards, {})._replace(scaler=scaling), None)


def test_the_state_of_another_scaler_goes_on_under_the_options_of_this_one() -> None:
    one, other = fs.GradScaler(8.0, growth_interval=1), fs.GradScaler(4.0, growth_factor=3.0, growth_interval=1)
    assert other.update(one.init(fs.Mesh()), torch.tensor(False)).scale == 24.0


def test_bfloat16_may_be_scaled_too() -> None:
    # Powers of two change no bit of a mantissa.
    scaler, mesh = fs.GradScaler(), fs.Mesh()
    grads = torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16()
    scaled = (grads * 2.0**16).bfloat16()
    assert torch.equal(scaler.unscale({"w": scaled}, scaler.init(mesh), mesh)[0]["w"], grads.float())


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("bad", [None, INF, float("nan")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_donated_gradients_are_unscaled_in_place_with_the_same_bits(dtype: torch.dtype, bad: float | None) -> None:
    scaler, mesh = fs.GradScaler(init_scale=24.0), fs.Mesh()
    state = scaler.init(mesh)
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
    if bad is not None:
        values[7] = bad
    wide = values.to(torch.promote_types(dtype, torch.float32))
    wanted = wide * state.scale.double().reciprocal().float().to(wide)
    kept, found = scaler.unscale({"w": values, "frozen": None}, state, mesh)
    given = values.clone()
    memory = given.data_ptr()
    new, found_again = scaler.unscale({"w": given, "frozen": None}, state, mesh, donate=True)
    for each in (kept, new):
        torch.testing.assert_close(each["w"], wanted, rtol=0, atol=0, equal_nan=True)
        assert each["frozen"] is None
    assert bool(found) == bool(found_again) == (bad is not None)
    assert (new["w"].data_ptr() == memory) == (dtype.itemsize >= 4)
    with pytest.raises(RuntimeError, match="was donated to a training step"):
        given.sum()
    assert values[0] != new["w"][0]  # the gradients that were not donated are as before


def test_gradients_with_a_graph_are_unscaled_differentiably() -> None:
    scaler, mesh = fs.GradScaler(init_scale=8.0), fs.Mesh()
    x = torch.ones(3, requires_grad=True)
    grads, found = scaler.unscale({"w": x * 2}, scaler.init(mesh), mesh)
    assert not found
    assert torch.equal(torch.autograd.grad(grads["w"].sum(), x)[0], torch.full((3,), 0.25))


@pytest.mark.parametrize("case", ["alone", "two ranks", "hook", "divisor", "local"])
def test_a_step_unscales_in_place_only_where_the_gradients_are_its_own(case: str) -> None:
    """A backward of the user's own returns one tensor as gradient each time; no step may change it."""
    constant = torch.full((4,), 3.0)

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return constant

    def main(mesh: fs.Mesh) -> bool:
        local = {"local": ["w"]} if case == "local" else {}
        plan = fs.make_plan({"w": torch.ones(4)}, mesh, strategy="no_shard", **local)  # type: ignore[arg-type]
        shards = fs.shard({"w": torch.ones(4)}, plan, mesh)
        loss_fn = lambda shards, buffers, batch: Constant.apply(shards[""][next(iter(shards[""]))])  # type: ignore[no-untyped-call] # noqa: E731
        options: Any = {"on_grads": lambda unit, grads: None} if case == "hook" else {}
        options |= {"divisor": 1.0} if case == "divisor" else {}
        optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        step = fs.make_train_step(loss_fn, optimizer, plan, mesh, scaler=fs.GradScaler(8.0), max_norm=0.1, **options)
        step(step.init(shards, {}), None)
        return step.owns_grads

    owned = fs.simulate(main, 1 if case == "alone" else 2)
    assert torch.equal(constant, torch.full((4,), 3.0))
    assert all(each == (case == "two ranks") for each in owned)
