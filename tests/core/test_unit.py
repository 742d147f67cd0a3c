"""unshard and reshard: views, lifetimes of gathered buffers, and compositions."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import funcshard as fs
from tests.core.units import by_hand, requiring_grad
from tests.ranks import on_ranks
from tests.storages import Log

PARAMS = {
    "w": torch.linspace(-1, 1, 35).reshape(5, 7),
    "b": torch.linspace(0, 1, 7),
    "v": torch.linspace(-1, 0, 35).reshape(7, 5),
}
X = torch.linspace(-2, 2, 15).reshape(3, 5)


def layer(leaves, x):
    return torch.tanh(x @ leaves["w"] + leaves["b"]) @ leaves["v"] + x


def one_unit(mesh, apply, combine=fs.reshard):
    plan, f, shards = by_hand(mesh, PARAMS, apply, how=combine)
    return f, shards[""], plan


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("operation", [torch.tanh, torch.relu], ids=lambda f: f.__name__)
@on_ranks(2)
def test_a_graph_that_is_dropped_without_backward_is_freed(mesh, operation):
    """Each of these operations saves its own result, which must not keep the graph behind it alive."""
    log = Log()

    def apply(leaves, x):
        out = operation(x @ leaves["w"])
        log(out)
        return out

    f, shard, _ = one_unit(mesh, apply)
    out = f(requiring_grad(shard), X)
    assert log.alive() == 1
    del out
    assert log.alive() == 0


@on_ranks(2)
def test_a_saved_tensor_that_is_changed_in_place_is_an_error_not_a_wrong_gradient(mesh):
    f, shard, _ = one_unit(mesh, lambda leaves, x: torch.exp(x @ leaves["w"]))
    out = f(requiring_grad(shard), X)
    out.detach().mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \(3, 7\) that unit '\(root\)' needs for its gradients was modified"):
        out.sum().backward()


@on_ranks(2)
def test_hooks_around_a_unit_get_its_activations_and_none_of_its_leaves(mesh):
    gathered, packed, unpacked = set(), [], []

    def apply(leaves, x):
        gathered.add(leaves["w"].untyped_storage().data_ptr())
        return layer(leaves, x)

    def pack(tensor):
        packed.append(tensor.untyped_storage().data_ptr())
        return len(packed) - 1, tensor.detach()

    def unpack(pair):
        unpacked.append(pair[0])
        return pair[1]

    f, shard, _ = one_unit(mesh, apply)
    with saved_tensors_hooks(pack, unpack):
        out = f(requiring_grad(shard), X)
    out.sum().backward()
    assert len(packed) == 3  # the input of the first product, and the result of tanh for itself and for the second one
    assert sorted(unpacked) == list(range(len(packed)))
    assert gathered.isdisjoint(packed)


def rows_of(x):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))


# For each layout: a function of a weight and an input that saves tensors of that layout.
LAYOUTS = {
    "COO": lambda w, x: torch.sparse.mm(torch.eye(3).to_sparse(), x @ w),
    "CSR": lambda w, x: torch.eye(3).to_sparse_csr() @ (x @ w),
    "COO of the leaf": lambda w, x: torch.sparse.mm(
        torch.sparse_coo_tensor(torch.arange(3).repeat(2, 1), w[0, :3], (3, 3), check_invariants=False), x
    ),
    "mkldnn": lambda w, x: torch.relu(x.to_mkldnn()).to_dense() @ w,
    "jagged": lambda w, x: torch.tanh(rows_of(x) @ w).values(),
    "jagged of the leaf": lambda w, x: torch.tanh(rows_of(w)).values()[:3],
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # torch 2.11
@pytest.mark.filterwarnings("ignore:Sparse CS[CR] tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_unit_may_save_tensors_that_are_sparse_opaque_or_nested(mesh, layout):
    x = X.clone().requires_grad_()
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    value = LAYOUTS[layout](leaves["w"], x).square().sum()
    wanted, wanted_x = torch.autograd.grad(value, [leaves["w"], x], allow_unused=True)
    f, shard, plan = one_unit(mesh, lambda leaves, x: LAYOUTS[layout](leaves["w"], x))
    x = X.clone().requires_grad_()
    shard = requiring_grad(shard)
    loss = f(shard, x).square().sum()
    grad_x = torch.autograd.grad(loss, x, allow_unused=True, retain_graph=True)[0]
    torch.testing.assert_close(grad_x, wanted_x)
    torch.testing.assert_close(loss, value.detach())
    grads = dict(zip(shard, torch.autograd.grad(loss, shard.values()), strict=True))
    torch.testing.assert_close(fs.gather({"": grads}, plan, mesh)["w"], 2 * wanted)


# For each layout: a function that puts the elements of a leaf into a tensor without copying them.
AROUND = {
    "COO": lambda w: torch.sparse_coo_tensor(torch.arange(7)[None], w[0], check_invariants=False),
    "CSR": lambda w: torch.sparse_csr_tensor(torch.tensor([0, 3, 7]), torch.arange(7), w[0], (2, 7), check_invariants=False),
    "jagged": rows_of,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", AROUND)
@on_ranks(2)
def test_a_result_that_holds_a_leaf_inside_does_not_share_its_memory(mesh, layout):
    seen = []

    def around(leaves):
        seen.append(leaves["w"].untyped_storage().data_ptr())
        return AROUND[layout](leaves["w"])

    f, shard, _ = one_unit(mesh, around)
    handle = f.start(shard)
    out = f(handle).detach()
    values = out._values() if layout == "COO" else out.values()
    assert values.untyped_storage().data_ptr() not in seen
    assert values.flatten()[:7].tolist() == PARAMS["w"][0].tolist()
