"""value_and_grad: what is averaged, what is zero, what is None."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import funcshard as fs

PARAMS = {"a": torch.linspace(1, 2, 5), "b": {"c": torch.linspace(-1, 1, 7)}}


def units_of(mesh, params=PARAMS, **options):
    plan = fs.make_plan(params, mesh, units=["b"], **options)
    root = fs.unshard(lambda leaves, x: (leaves["a"] * x).sum(), plan.units[""], mesh)
    inner = fs.reshard(fs.unshard(lambda leaves, x: (leaves["c"] ** 2 * x).sum(), plan.units["b"], mesh))
    return plan, fs.shard(params, plan, mesh), root, inner


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("world", [1, 2, 3, {"replicate": 2, "shard": 2}], ids=str)
def test_the_loss_is_this_ranks_and_the_gradient_the_mean_over_the_world(world, strategy):
    def main(mesh):
        plan, shards, root, inner = units_of(mesh, strategy=strategy)
        x = float(mesh.rank + 1)
        loss, grads = fs.value_and_grad(lambda s: root(s[""], x) + inner(s["b"], x))(shards)
        return loss, fs.gather(grads, plan, mesh), x, mesh.world_size

    for loss, grads, x, ranks in fs.simulate(main, world):
        torch.testing.assert_close(loss, x * (PARAMS["a"].sum() + (PARAMS["b"]["c"] ** 2).sum()))
        mean = (ranks + 1) / 2
        torch.testing.assert_close(grads["a"], torch.full((5,), mean))
        torch.testing.assert_close(grads["b"]["c"], 2 * mean * PARAMS["b"]["c"])


def test_aux_and_the_rest_of_the_arguments_pass_through():
    def main(mesh):
        _, shards, root, _ = units_of(mesh)
        evaluate = fs.value_and_grad(lambda s, x, *, y: (root(s[""], x), {"y": y}), has_aux=True)
        (loss, aux), grads = evaluate(shards, 2.0, y="kept")
        return loss.requires_grad, aux, list(grads)

    assert fs.simulate(main, 2) == [(False, {"y": "kept"}, ["", "b"])] * 2


def test_a_shard_that_the_loss_does_not_use_has_a_gradient_of_zeros():
    def main(mesh):
        _, shards, root, _ = units_of(mesh)
        return fs.value_and_grad(lambda s: root(s[""], 1.0))(shards)[1]["b"]["float32"]

    assert all(torch.equal(grad, torch.zeros(4)) for grad in fs.simulate(main, 2))


def test_a_loss_that_uses_no_shard_has_gradients_of_zeros_and_no_collective():
    def main(mesh):
        _, shards, _, _ = units_of(mesh)
        with fs.record_events() as events:
            loss, grads = fs.value_and_grad(lambda s: torch.tensor(3.0))(shards)
        return loss.item(), [g.abs().sum().item() for g in (grads[""]["float32"], grads["b"]["float32"])], list(events)

    assert fs.simulate(main, 2) == [(3.0, [0.0, 0.0], [])] * 2


def test_frozen_and_integer_leaves_carry_no_gradient():
    params = {"a": torch.ones(5, requires_grad=True), "b": {"c": torch.ones(3), "n": torch.arange(4)}}

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["b"])
        inner = fs.reshard(fs.unshard(lambda leaves, x: (leaves["c"] * leaves["n"][:3] * x).sum(), plan.units["b"], mesh))
        root = fs.unshard(lambda leaves: leaves["a"], plan.units[""], mesh)
        shards = fs.shard(params, plan, mesh)
        _, grads = fs.value_and_grad(lambda s: inner(s["b"], root(s[""]).sum()))(shards)
        return grads["b"], fs.gather({"": grads[""], "b": shards["b"]}, plan, mesh)["a"]

    for inner, a in fs.simulate(main, 2):
        assert inner == {"float32.frozen": None, "int64.frozen": None}
        torch.testing.assert_close(a, torch.full((5,), 3.0))


def test_a_unit_that_is_gathered_twice_adds_up_its_gradients():
    def main(mesh):
        plan, shards, _, inner = units_of(mesh)
        with fs.record_events() as events:
            _, grads = fs.value_and_grad(lambda s: inner(s["b"], 1.0) + inner(s["b"], 2.0))(shards)
        return fs.gather(grads, plan, mesh)["b"]["c"], [event.kind for event in events].count("reduce_scatter")

    for grad, reductions in fs.simulate(main, 3):
        torch.testing.assert_close(grad, 6 * PARAMS["b"]["c"])
        assert reductions == 2


def test_terms_on_the_shards_themselves_count_once_in_the_mean():
    def main(mesh):
        plan, shards, _, inner = units_of(mesh)

        def loss_fn(s):
            decay = mesh.world_size * 0.5 * s["b"]["float32"].square().sum()  # as docs/gradients.md says to write it
            return inner(s["b"], 1.0) + decay

        return fs.gather(fs.value_and_grad(loss_fn)(shards)[1], plan, mesh)["b"]["c"]

    for grad in fs.simulate(main, 2):
        torch.testing.assert_close(grad, 3 * PARAMS["b"]["c"])


def test_shards_may_be_transformed_before_they_are_gathered():
    def main(mesh):
        plan, shards, _, inner = units_of(mesh)
        halved = lambda unit: {key: local * 0.5 for key, local in unit.items()}  # noqa: E731
        _, grads = fs.value_and_grad(lambda s: inner(halved(s["b"]), 1.0))(shards)
        return fs.gather(grads, plan, mesh)["b"]["c"]

    for grad in fs.simulate(main, 2):
        torch.testing.assert_close(grad, 0.5 * PARAMS["b"]["c"])


def test_checkpointed_units_give_their_gradients_to_the_step():
    def main(mesh):
        plan, shards, root, inner = units_of(mesh)

        def loss_fn(s):
            x = root(s[""], 1.0)
            return checkpoint(inner, s["b"], x, use_reentrant=False)

        return fs.gather(fs.value_and_grad(loss_fn)(shards)[1], plan, mesh)

    a, c = PARAMS["a"].clone().requires_grad_(), PARAMS["b"]["c"].clone().requires_grad_()
    expected = torch.autograd.grad((c**2).sum() * a.sum(), [a, c])
    for grads in fs.simulate(main, 2):
        torch.testing.assert_close(grads["a"], expected[0])
        torch.testing.assert_close(grads["b"]["c"], expected[1])


def test_an_inner_gradient_inside_the_loss_is_not_mistaken_for_the_steps_own():
    def main(mesh):
        plan, shards, _, inner = units_of(mesh)

        def loss_fn(s):
            (by_c,) = torch.autograd.grad(inner(s["b"], 1.0), s["b"]["float32"], create_graph=True)
            return fs.psum((by_c / mesh.world_size).square().sum(), mesh)

        return fs.gather(fs.value_and_grad(loss_fn)(shards)[1], plan, mesh)["b"]["c"]

    for grad in fs.simulate(main, 2):  # d/dc of |2c|^2
        torch.testing.assert_close(grad, 8 * PARAMS["b"]["c"])


@pytest.mark.parametrize(
    ("result", "options", "words"),
    {
        "a vector": (torch.ones(2), {}, r"must return a floating-point scalar.*shape \(2,\)"),
        "an integer": (torch.tensor(1), {}, "must return a floating-point scalar.*torch.int64"),
        "a number": (1.0, {}, "must return a floating-point scalar.*found 1.0"),
        "a pair without has_aux": ((torch.tensor(1.0), 2), {}, r"for \(loss, aux\) pass has_aux=True"),
        "no pair with has_aux": (torch.tensor(1.0), {"has_aux": True}, r"must return a pair \(loss, aux\); found Tensor"),
    }.values(),
    ids=["a vector", "an integer", "a number", "a pair without has_aux", "no pair with has_aux"],
)
def test_a_loss_that_is_no_scalar_is_refused(result, options, words):
    with pytest.raises(TypeError, match=words):
        fs.value_and_grad(lambda s: result, **options)({"": {"float32": torch.ones(2)}})


def test_units_of_worlds_of_different_sizes_in_one_loss_are_refused():
    def main(mesh):
        smaller = fs.Mesh(shard=mesh.shard, device=mesh.device)
        _, shards, root, _ = units_of(mesh)
        _, _, other, _ = units_of(smaller)
        fs.value_and_grad(lambda s: root(s[""], 1.0) + other({"float32": s[""]["float32"] * 2}, 1.0))(shards)

    with pytest.raises(ValueError, match=r"must belong to worlds of one size.*found sizes \[2, 4\]"):
        fs.simulate(main, {"replicate": 2, "shard": 2})


def test_the_callers_shards_are_left_alone():
    def main(mesh):
        _, shards, _, inner = units_of(mesh)
        before = shards["b"]["float32"].clone()
        with torch.no_grad():
            fs.value_and_grad(lambda s: inner(s["b"], 1.0))(shards)
        local = shards["b"]["float32"]
        return torch.equal(local, before), local.requires_grad, local.grad

    assert fs.simulate(main, 2) == [(True, False, None)] * 2
