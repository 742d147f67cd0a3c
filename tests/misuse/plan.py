"""Mistakes with plans, schedules and policies."""

import collections
import dataclasses

import torch
from torch import nn

import funcshard as fs
from tests.misuse import APPLY, NET, PARAMS, Table, right, set_up, untold, values, whole_grads

CASES = Table()
MISTAKES = "docs/mistakes.md"
LINEARS = ["0", "2", "4"]


def plan(mesh, params=PARAMS, **options):
    return fs.make_plan(params, mesh, **options)


# --- make_plan ------------------------------------------------------------------------------------

CASES += [
    ("make_plan", "mesh and params swapped", ValueError("mesh must be a number of ranks"),
     lambda mesh: fs.make_plan(mesh, PARAMS)),
    ("make_plan", "a result of torch.max as params", TypeError("convert it to a plain tuple first"),
     lambda mesh: fs.make_plan(torch.ones(2, 2).max(dim=0), mesh)),
    ("make_plan", "a default dictionary in params", TypeError("convert it to a dict, list, tuple or namedtuple first"),
     lambda mesh: fs.make_plan({"layers": collections.defaultdict(dict, w=torch.ones(2))}, mesh)),
    ("wrap.by_size", "a list of classes to exclude", TypeError("exclude must be a tuple of module classes"),
     lambda mesh: plan(mesh, units=fs.wrap.by_size(1, exclude=[nn.Linear])(NET))),
    ("make_plan", "one path instead of a list", TypeError("write ['0']"), lambda mesh: plan(mesh, units="0")),
    ("make_plan", "the parameters of a module, as torch's optimizers take them",
     TypeError("pass the params of make_functional(module), or a tree such as dict(module.named_parameters())"),
     lambda mesh: fs.make_plan(NET.parameters(), mesh)),
    ("make_plan", "a policy that was not applied", TypeError("apply a policy to the module"),
     lambda mesh: plan(mesh, units=fs.wrap.always())),
    ("make_plan", "classes instead of paths", TypeError("pass units=fs.wrap.by_class(Linear)(module)"),
     lambda mesh: plan(mesh, units=[nn.Linear])),
    ("make_plan", "one path twice", ValueError("units name '0' twice"), lambda mesh: plan(mesh, units=["0", "*", "0"])),
    ("make_plan", "units that are freed after forward, to stay over micro-batches",
     ValueError("reshard_after_backward=False keeps a unit gathered until the next micro-batch"),
     lambda mesh: plan(mesh, units=LINEARS, reshard_after_backward=False)),
    ("make_plan", "copies to be freed after forward", ValueError("leave it out, or choose 'full_shard'"),
     lambda mesh: plan(mesh, strategy="no_shard", reshard_after_forward=True)),
    ("make_plan fully_shard", "a parameter as a unit", ValueError("is no module of this model"),
     lambda mesh: fs.fully_shard(APPLY, plan(mesh, units=["0.weight"]), mesh)),
    ("make_plan", "units in another order than the model's", right(whole_grads),
     lambda mesh: (s := set_up(mesh, units=["4", "2", "0"])).whole(s.grads())),
    ("make_plan", "two tensors called tied", ValueError("several tensors there"),
     lambda mesh: plan(mesh, ties=[("0.weight", "2.weight")])),
    ("make_plan", "an axis that no mesh has",
     ValueError("one or several axes of the mesh, ['replicate', 'shard']; found 'row'"),
     lambda mesh: plan(mesh, local={"0": "row"})),
    ("make_plan", "offload where all is on the CPU", right(whole_grads),
     lambda mesh: (s := set_up(mesh, offload=True)).whole(s.grads())),
    ("make_plan", "torch's name of a strategy", ValueError("did you mean 'full_shard'?"),
     lambda mesh: plan(mesh, strategy="FULL_SHARD")),
    ("make_plan", "a leaf local along an axis of one rank",
     ValueError("leaf 'w' of params must have the same values on every rank"), lambda mesh: keeps_its_own(mesh, "replicate"),
     (2, 4)),
    ("make_plan", "detached copies of frozen leaves, for a function by hand",
     untold(MISTAKES, "A detached copy of a frozen parameter does not say that it was frozen.",
        ["float32", "float32.frozen"]),
     lambda mesh: [buffer.key for buffer in plan(mesh, detached(fs.make_functional(half_frozen())[1])).units[""].buffers]),
    ("make_plan fully_shard", "detached copies of frozen leaves, for their module",
     UserWarning("the plan trains every parameter, but 1 of them"),
     lambda mesh: fs.fully_shard((made := fs.make_functional(half_frozen()))[0], plan(mesh, detached(made[1])), mesh)),
]  # fmt: skip


def keeps_its_own(mesh, axis):
    params = {"w": torch.ones(4) * mesh.rank}
    own = plan(mesh, params, local={"w": axis})
    return torch.equal(fs.gather(fs.shard(params, own, mesh), own, mesh)["w"], params["w"])


def half_frozen():
    net = nn.Linear(4, 4)
    net.bias.requires_grad_(False)
    return net


def detached(params):
    return {name: leaf.detach().clone() for name, leaf in params.items()}


class Tied(nn.Module):
    """An embedding that is the output layer too."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.outer.weight = self.inner.weight


CASES += [
    ("make_plan fully_shard", "copies of params, whose ties are lost", ValueError("or ties=apply.ties"),
     lambda mesh: fs.fully_shard((made := fs.make_functional(Tied()))[0], plan(mesh, detached(made[1]), units=["inner"]),
        mesh)),
    ("make_plan fully_shard", "a state dict with both names of a tie", ValueError("has ['outer.weight'] besides"),
     lambda mesh: fs.fully_shard(fs.make_functional(Tied())[0], plan(mesh, detached(Tied().state_dict())), mesh)),
]  # fmt: skip

# --- Plan -----------------------------------------------------------------------------------------

CASES += [
    ("Plan", "JSON of something else", ValueError("expected JSON written by Plan.to_json"),
     lambda mesh: fs.Plan.from_json("{}")),
    ("Plan", "the path of a file", ValueError("read the file first"), lambda mesh: fs.Plan.from_json("plan.json")),
    ("Plan shard", "a stored plan for other ranks", ValueError("the plan was made for a mesh of"),
     lambda mesh: fs.shard(PARAMS, fs.Plan.from_json(fs.make_plan(PARAMS, 3).to_json()), mesh)),
    ("Plan", "another mesh put into a plan", ValueError("was planned for mesh"),
     lambda mesh: dataclasses.replace(fs.make_plan(PARAMS, 8), mesh_shape=(1, 2))),
    ("Plan gather", "the plan in full precision for shards of the other", right(values),
     lambda mesh: fs.gather((s := set_up(mesh, precision=fs.MixedPrecision(torch.bfloat16))).shards,
        s.plan.in_full_precision(), mesh)),
]  # fmt: skip

# --- MixedPrecision -------------------------------------------------------------------------------

CASES += [
    ("MixedPrecision make_plan", "a dtype instead of a precision", TypeError("must be a funcshard.MixedPrecision"),
     lambda mesh: plan(mesh, precision=torch.bfloat16)),
    ("MixedPrecision", "the name of a dtype", ValueError("param_dtype must be a floating-point torch.dtype"),
     lambda mesh: fs.MixedPrecision("bfloat16")),
    ("MixedPrecision", "one class instead of a tuple", TypeError("must be a tuple of module classes"),
     lambda mesh: fs.MixedPrecision(torch.bfloat16, ignored_classes=nn.LayerNorm)),
    ("MixedPrecision", "the short name of a class", ValueError("pass the class itself"),
     lambda mesh: fs.MixedPrecision(torch.bfloat16, ignored_classes=("LayerNorm",))),
]  # fmt: skip


@CASES("MixedPrecision", "integer leaves", right(("torch.bfloat16", "torch.int64")))
def _(mesh):
    params = {"w": torch.ones(4), "ids": torch.arange(4)}
    own = plan(mesh, params, precision=fs.MixedPrecision(torch.bfloat16))
    f = fs.unshard(lambda leaves: (str(leaves["w"].dtype), str(leaves["ids"].dtype)), own.units[""], mesh)
    return f(fs.shard(params, own, mesh)[""])


class Ids(nn.Module):
    """A model that gets ids as floating-point numbers, and returns them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids):
        return ids.long()


@CASES(
    "MixedPrecision fully_shard",
    "ids in a floating-point dtype",
    untold(MISTAKES, "Token ids in a floating-point dtype are cast as all such inputs are", torch.tensor([259])),
)
def _(mesh):
    apply, params, buffers = fs.make_functional(Ids())
    own = plan(mesh, params, precision=fs.MixedPrecision(torch.bfloat16))
    return fs.fully_shard(apply, own, mesh)(fs.shard(params, own, mesh), buffers, torch.tensor([259.0]))


# --- schedules and predictions --------------------------------------------------------------------

CASES += [
    ("make_schedule", "params instead of a plan", TypeError("plan must be the Plan that make_plan returned"),
     lambda mesh: fs.make_schedule(PARAMS)),
    ("make_schedule", "a unit that the plan lacks", ValueError("the plan has no unit '1'"),
     lambda s: fs.make_schedule(s.plan, ["1"])),
    ("Schedule make_schedule", "torch's kind of prefetch", ValueError("must be 'pre', 'post' or None"),
     lambda s: fs.make_schedule(s.plan, backward_prefetch="BACKWARD_PRE")),
    ("predict_events", "params instead of a plan", TypeError("plan must be the Plan that make_plan returned"),
     lambda mesh: fs.predict_events(PARAMS)),
    ("predict_events", "a unit that the plan lacks", ValueError("the plan has no unit '9'"),
     lambda s: fs.predict_events(s.plan, ["9"])),
    ("predict_events Schedule", "the schedule of another plan", ValueError("found '4'; the plan's units are"),
     lambda s: fs.predict_events(s.plan, fs.make_schedule(plan(s.mesh, units=["4"])))),
]  # fmt: skip

# --- policies -------------------------------------------------------------------------------------

CASES += [
    ("wrap.by_class", "no class", TypeError("one or more subclasses of torch.nn.Module"), lambda mesh: fs.wrap.by_class()),
    ("wrap.by_class", "a class that the model lacks", ValueError("the model is made of Linear"),
     lambda mesh: fs.wrap.by_class(nn.Conv2d)(NET)),
    ("wrap.by_class", "params instead of a module", TypeError("write policy(module)"),
     lambda mesh: fs.wrap.by_class(nn.Linear)(PARAMS)),
    ("wrap.by_class", "applied to another module", ValueError("unit '1' matches no part of the tree"),
     lambda mesh: plan(mesh, units=fs.wrap.by_class(nn.Linear)(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))),
    ("wrap.by_size", "params instead of a module", TypeError("write policy(module)"),
     lambda mesh: fs.wrap.by_size(8)(PARAMS)),
    ("wrap.by_size", "no module is so large", right(whole_grads),
     lambda mesh: (s := set_up(mesh, units=fs.wrap.by_size(10**9)(NET))).whole(s.grads())),
    ("wrap.by_size", "a class that would be a unit is excluded", right(["0", "2"]),
     lambda mesh: [*fs.wrap.by_size(6, exclude=(nn.ModuleList,))(NET)]),
    ("wrap.by_function", "an option that no unit has", ValueError("a unit can override 'strategy'"),
     lambda mesh: plan(mesh, units=fs.wrap.by_function(lambda module: {"sharding": "no_shard"})(NET))),
    ("wrap.by_function", "a function of names", right([]),
     lambda mesh: [*fs.wrap.by_function(lambda name: name == "0")(NET)]),
    ("wrap.by_function wrap.Units", "overrides lost in a plain list",
     untold(MISTAKES, "keeps the paths and loses the overrides.", ["no_shard"] * 3),
     lambda mesh: [unit.strategy for unit in plan(mesh, units=[*not_sharded()]).unit_list]),
    ("wrap.Units", "a group added to the units of a policy", right({"0": "no_shard", "4": "no_shard", "1+2": "full_shard"}),
     lambda mesh: {name: unit.strategy for name, unit in
        fs.make_plan({str(i): torch.ones(3) for i in range(5)}, mesh, units=grouped()).units.items() if name}),
    ("make_plan", "the result of a policy as one unit of a list", TypeError("units hold the result of a policy"),
     lambda mesh: plan(mesh, units=[not_sharded(), "2"])),
    ("make_plan", "a group of paths inside each other", ValueError("leave the inner path out"),
     lambda mesh: plan(mesh, units=[["0", "0.weight"]])),
    ("make_plan", "ranks after forward that divide no row", ValueError("divides the"),
     lambda mesh: plan(mesh, reshard_after_forward=5)),
    ("make_plan", "ranks after forward as a text", TypeError("reshard_after_forward must be a whole number of ranks"),
     lambda mesh: plan(mesh, reshard_after_forward="2")),
    ("make_plan", "one rank after forward", right([False]),
     lambda mesh: [unit.reshard_after_forward for unit in plan(mesh, reshard_after_forward=1).unit_list][:1]),
    ("make_plan", "a strategy in the place of options", TypeError("must be a dictionary"),
     lambda mesh: plan(mesh, units={"0": "no_shard"})),
    ("wrap.Units", "a unit removed, its overrides left", ValueError("remove the entry from units.overrides too"),
     lambda mesh: (units := not_sharded()).remove("2") or plan(mesh, units=units)),
    ("wrap.Units", "overrides of a unit that is not chosen", ValueError("units override options of '2'"),
     lambda mesh: plan(mesh, units=fs.wrap.Units(["0"], {"2": {"offload": True}}))),
    ("wrap.always", "params instead of a module", TypeError("write policy(module)"), lambda mesh: fs.wrap.always()(PARAMS)),
    ("wrap.always", "the module given at once", TypeError("takes 0 positional arguments"), lambda mesh: fs.wrap.always(NET)),
    ("wrap.always", "containers without a forward", right(["0.0"]),
     lambda mesh: [*fs.wrap.always()(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])))]),
    ("wrap.any_of", "a list of policies", TypeError("any_of(*policies)"), lambda mesh: fs.wrap.any_of([fs.wrap.always()])),
    ("wrap.any_of wrap.Policy", "units instead of policies", TypeError("any_of takes policies"),
     lambda mesh: fs.wrap.any_of(["0"], ["2"])),
    ("wrap.any_of wrap.Policy", "a policy that returns a plain list", right(LINEARS),
     lambda mesh: [*fs.wrap.any_of(lambda module: ["0"], fs.wrap.always())(NET)]),
]  # fmt: skip


def grouped():
    return fs.wrap.Units(["0", "4"], {"0": {"strategy": "no_shard"}, "4": {"strategy": "no_shard"}}) + [["1", "2"]]  # noqa: RUF005


def not_sharded():
    return fs.wrap.by_function(lambda module: {"strategy": "no_shard"})(NET)


STACKS = {"blocks": {"w": torch.ones(3, 2, 2), "b": torch.ones(3, 2)}, "head": torch.ones(2, 2)}
LAYERS = fs.unstack(STACKS, "blocks")

CASES += [
    ("unstack", "the whole model", ValueError("pass the path of the stacked layers alone"),
     lambda mesh: fs.unstack(STACKS, "")),
    ("unstack", "a glob of its leaves", ValueError("found no node 'blocks.*'"), lambda mesh: fs.unstack(STACKS, "blocks.*")),
    ("unstack", "the layers are cut by the plan of the stack",
     ValueError("params must be the tree that the plan was made for"),
     lambda mesh: fs.shard(LAYERS, fs.make_plan(STACKS, mesh), mesh)),
    ("stack", "shards", ValueError("found no node 'blocks'"),
     lambda mesh: fs.stack(fs.shard(LAYERS, fs.make_plan(LAYERS, mesh, units=["blocks.*"]), mesh), "blocks")),
    ("stack", "a stack", ValueError("takes the path of a list of layers"), lambda mesh: fs.stack(STACKS, "blocks")),
    ("stack", "layers of two kinds", ValueError("stack equal layers alone"),
     lambda mesh: fs.stack({"blocks": [*LAYERS["blocks"], {"w": torch.ones(2, 3), "b": torch.ones(2)}]}, "blocks")),
]  # fmt: skip
