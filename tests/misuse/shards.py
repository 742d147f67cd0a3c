"""Mistakes with shards, full parameters and state dicts."""

import optree
import torch
from torch import nn

import funcshard as fs
from tests.misuse import EVERYWHERE, NET, PARAMS, Table, clone, right, set_up, untold, values, whole_loss

CASES = Table()
MISTAKES = "docs/mistakes.md"
PLAIN = "A shard is a plain 1-D tensor. It doesn't know its unit, its rank or its plan"


def meta(net=NET):
    with torch.device("meta"):
        return nn.Sequential(
            *[type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else nn.Tanh() for m in net]
        )


def loaded(mesh, state_dict, **options):
    s = set_up(mesh)
    return s.whole(fs.from_state_dict(state_dict, s.plan, mesh, **options))


# --- shard ----------------------------------------------------------------------------------------

CASES += [
    ("shard", "the module's state dict", right(values),
     lambda mesh: (s := set_up(mesh)).whole(fs.shard(NET.state_dict(), s.plan, mesh))),
    ("shard", "shards a second time", ValueError("these are shards already"),
     lambda mesh: fs.shard((s := set_up(mesh)).shards, s.plan, mesh)),
    ("shard", "a square matrix transposed", untold(MISTAKES, "a transposed square matrix has the planned shape.", values),
     lambda mesh: (s := set_up(mesh)).whole(fs.shard({**values(), "0.weight": PARAMS["0.weight"].detach().T}, s.plan,
        mesh))),
]  # fmt: skip

# --- gather ---------------------------------------------------------------------------------------

CASES += [
    ("gather", "under a plan that swaps two leaves of one size", untold(MISTAKES, PLAIN, values),
     lambda mesh: fs.gather((s := set_up(mesh)).shards, renamed(s.plan), mesh)),
]  # fmt: skip


def renamed(plan):
    """Return a plan of the same sizes for a tree with other names."""
    tree = {**values(), "0.bias": torch.ones(16), "0.weight": torch.ones(4)}
    return fs.make_plan(tree, dict(zip(("replicate", "shard"), plan.mesh_shape, strict=True)), units=["0", "2"])


@CASES("shard gather", "the shards of another rank", untold(MISTAKES, PLAIN, values), (2, 4))
def _(mesh):
    s = set_up(mesh)

    def neighbours(shard):
        rows = torch.zeros(mesh.world_size, shard.numel())
        rows[mesh.rank] = shard
        return fs.psum(rows, mesh)[(mesh.rank + 1) % mesh.world_size]

    return s.whole(optree.tree_map(neighbours, s.shards))


# --- init_shards, init_module ---------------------------------------------------------------------


def ones(unit):
    return {leaf.path: torch.ones(leaf.shape) for leaf in unit.leaves}


def init_two(values):
    plan = fs.make_plan({"a": torch.zeros(2), "b": torch.zeros(2)}, 1)
    return fs.init_shards(lambda unit: values, plan, fs.Mesh())


CASES += [
    ("init_shards", "values of some leaves", ValueError("leaves of unit '(root)', ['a', 'b']; found ['a']"),
     lambda: init_two({"a": torch.zeros(2)})),
    ("init_shards", "no values", ValueError("leaves of unit '(root)', ['a', 'b']; found NoneType"), lambda: init_two(None)),
    ("init_shards", "values of another shape", ValueError("leaf 'a' of init(unit) must have shape (2,) and dtype float32"),
     lambda: init_two({"a": torch.zeros(3), "b": torch.zeros(2)})),
    ("init_module", "another word for draws",
     ValueError("draws must be 'whole' or 'blocks'; found 'block': did you mean 'blocks'"),
     lambda: fs.init_module(meta(), fs.make_plan(PARAMS, 1), fs.Mesh(), draws="block")),
    ("init_module", "a number for draws", TypeError("draws must be 'whole' or 'blocks'; found 3: pass one of these"),
     lambda: fs.init_module(meta(), fs.make_plan(PARAMS, 1), fs.Mesh(), draws=3)),
    ("init_shards", "ranks are seeded apart", ValueError("the state of torch's random number generators"),
     lambda mesh: (s := set_up(mesh)) and torch.manual_seed(mesh.rank) and fs.init_shards(ones, s.plan, mesh), EVERYWHERE),
    ("init_module", "ranks are seeded apart", ValueError("the state of torch's random number generators"),
     lambda mesh: (s := set_up(mesh)) and torch.manual_seed(mesh.rank) and fs.init_module(meta(), s.plan, mesh), EVERYWHERE),
    ("init_module", "a module that has values", ValueError("use shard(params, plan, mesh)"),
     lambda mesh: fs.init_module(NET, set_up(mesh).plan, mesh)),
    ("init_module", "another module", ValueError("the plan was made for another module"),
     lambda mesh: fs.init_module(meta([NET[0]]), set_up(mesh).plan, mesh)),
]  # fmt: skip


@CASES("init_module", "parameters are no longer tied", ValueError("the plan ties parameter '0.weight' to '1.weight'"))
def _(mesh):
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    plan = fs.make_plan(fs.make_functional(net)[1], mesh)
    net[1].weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    return fs.init_module(net, plan, mesh)


# --- to_state_dict --------------------------------------------------------------------------------

CASES += [
    ("to_state_dict", "buffers is a truth value", TypeError("buffers must be a dictionary"),
     lambda mesh: fs.to_state_dict((s := set_up(mesh)).shards, s.plan, mesh, buffers=True)),
    ("to_state_dict Piece", "a piece taken for the leaf",
     untold(MISTAKES, "The tensor of a `Piece` is only a part of its leaf", lambda: values()["0.weight"]),
     lambda mesh: fs.to_state_dict((s := set_up(mesh)).shards, s.plan, mesh, sharded=True)["0.weight"].tensor),
]  # fmt: skip


def piece_stays(s):
    piece = next(iter(fs.to_state_dict(s.shards, s.plan, s.mesh, sharded=True).values()))
    before = piece.tensor.clone()
    optree.tree_map(torch.Tensor.zero_, s.shards)
    return torch.equal(piece.tensor, before)


CASES += [
    ("to_state_dict", "pieces kept while the shards change",
     untold("docs/state.md", "each rank gets its piece of every leaf, as views, without communication", True), piece_stays),
]  # fmt: skip


@CASES("to_state_dict", "buffers forgotten", RuntimeError("Missing key(s)"))
def _(mesh):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    params = fs.make_functional(net)[1]
    plan = fs.make_plan(params, mesh)
    return net.load_state_dict(fs.to_state_dict(fs.shard(params, plan, mesh), plan, mesh))


CASES += [
    ("init_buffers", "the function in place of the module", TypeError("takes a torch.nn.Module; found Functional"),
     lambda mesh: fs.init_buffers(fs.make_functional(NET)[0], mesh)),
    ("init_buffers", "a buffer that no reset writes", ValueError("no reset wrote ['num_batches_tracked', 'running_mean'"),
     lambda mesh: fs.init_buffers(nn.BatchNorm1d(3, device="meta"), mesh, reset=lambda module: None)),
    ("init_buffers", "a module that has values", right(lambda: dict(nn.BatchNorm1d(3).named_buffers())),
     lambda mesh: fs.init_buffers(nn.BatchNorm1d(3), mesh)),
]  # fmt: skip


# --- from_state_dict, Piece -----------------------------------------------------------------------


def full_pieces(cut):
    return {name: cut(leaf.flatten(), tuple(leaf.shape)) for name, leaf in values().items()}


CASES += [
    ("from_state_dict", "buffers among the parameters", right(values),
     lambda mesh: loaded(mesh, {**values(), "9.running_mean": torch.ones(3)})),
    ("Piece", "the tensor has the leaf's shape", ValueError("must be 1-D, of shape"),
     lambda mesh: loaded(mesh, full_pieces(lambda flat, shape: fs.Piece(flat.view(1, -1), 0, shape)))),
    ("Piece", "offset and shape swapped", ValueError("must be 1-D, of shape"),
     lambda mesh: loaded(mesh, full_pieces(lambda flat, shape: fs.Piece(flat, shape, 0)))),
]  # fmt: skip


# --- shards in a call -----------------------------------------------------------------------------


def call(mesh, change):
    s = set_up(mesh)
    return fs.pmean(s.loss(change(s.shards), s.x), mesh).detach()


def each(f):
    return lambda shards: optree.tree_map(f, shards)


CASES += [
    ("fully_shard", "shards of two equal units swapped", untold(MISTAKES, PLAIN, whole_loss),
     lambda mesh: call(mesh, lambda shards: {**shards, "0": shards["2"], "2": shards["0"]})),
    ("fully_shard", "shards that are not contiguous", right(whole_loss),
     lambda mesh: call(mesh, each(lambda shard: torch.stack([shard, shard], 1)[:, 0]))),
    ("fully_shard", "buffers left out", TypeError("buffers must be a dictionary"),
     lambda mesh: (s := set_up(mesh)).sharded(clone(s.shards), s.x)),
]  # fmt: skip
