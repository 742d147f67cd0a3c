"""Mistakes with plans, schedules and policies."""

import torch
from torch import nn

import funcshard as fs
from tests.misuse import NET, PARAMS, Table, right, set_up, untold, values, whole_grads

CASES = Table()
MISTAKES = "docs/mistakes.md"
FROZEN = {name: nn.Parameter(torch.ones(4, 16), requires_grad=False) for name in "wv"}
LINEARS = ["0", "2", "4"]


def plan(mesh, params=PARAMS, **options):
    return fs.make_plan(params, mesh, **options)


def by_value(blocks):
    return blocks.half() if blocks.any() else blocks


# --- make_plan ------------------------------------------------------------------------------------

CASES += [
    ("make_plan", "a result of torch.max as params", TypeError("convert it to a plain dict, list, tuple"),
     lambda mesh: fs.make_plan(torch.ones(2, 2).max(dim=0), mesh)),
    ("wrap.by_size", "a list of classes to exclude", TypeError("exclude must be a tuple of module classes"),
     lambda mesh: plan(mesh, units=fs.wrap.by_size(1, exclude=[nn.Linear])(NET))),
    ("make_plan", "one path instead of a list", TypeError("write ['0']"), lambda mesh: plan(mesh, units="0")),
    ("make_plan", "the parameters of a module, as torch's optimizers take them",
     TypeError("pass the params of make_functional(module), or a tree such as dict(module.named_parameters())"),
     lambda mesh: fs.make_plan(NET.parameters(), mesh)),
    ("make_plan", "units in another order than the model's", right(whole_grads),
     lambda mesh: (s := set_up(mesh, units=["4", "2", "0"])).whole(s.grads())),
    ("make_plan", "storage that matches no frozen leaf", ValueError("must match frozen floating-point leaves"),
     lambda mesh: plan(mesh, storage={"**": fs.nf4()})),
    ("make_plan", "a storage in place of a mapping", TypeError("storage must map paths or globs to pairs"),
     lambda mesh: plan(mesh, storage=fs.nf4())),
    ("make_plan", "one function as storage", TypeError("must be a pair (encode, decode) of functions"),
     lambda mesh: plan(mesh, storage={"**": torch.clone})),
    ("Storage", "no functions", TypeError("a Storage takes two functions, encode and decode"),
     lambda mesh: fs.Storage(1, 2)),
    ("nf4", "an odd block", ValueError("block must be even, because two elements share a byte; found 7"),
     lambda mesh: fs.nf4(7)),
    ("make_plan", "two pairs of one name", ValueError("two pairs of storage have the name"),
     lambda mesh: plan(mesh, FROZEN, storage={"w": (torch.clone, torch.clone), "v": (torch.clone, torch.abs)})),
    ("make_plan", "an override that does not exist", ValueError("a unit can override 'strategy'"),
     lambda mesh: fs.make_plan(PARAMS, mesh, units={"0": {"sharding_strategy": 1}})),
    ("make_plan", "other functions under a name of the library", ValueError("has the name 'nf4' of a storage of the"),
     lambda mesh: plan(mesh, FROZEN, storage={"w": fs.Storage(torch.clone, torch.clone, name="nf4")})),
    ("make_plan", "an encode without rows", ValueError("with one row for each block; found the shapes [(128,)]"),
     lambda mesh: plan(mesh, FROZEN, storage={"w": (torch.flatten, torch.clone)})),
    ("make_plan", "a decode without the blocks", ValueError("must return the blocks, of shape (2, 64)"),
     lambda mesh: plan(mesh, FROZEN, storage={"w": (torch.clone, torch.flatten)})),
    ("make_plan", "a slice that is to be packed", ValueError("leaf 'w' is a slice of a larger tensor"),
     lambda mesh: plan({"shard": 1, "tensor": 2}, FROZEN, local={"w": {"tensor": 0}}, storage={"w": fs.nf4()})),
    ("shard", "an encode whose dtypes depend on values", ValueError("return the same dtypes and shapes for all values"),
     lambda mesh: fs.shard(FROZEN, plan(mesh, FROZEN, storage={"w": (by_value, torch.Tensor.float)}), mesh)),
    ("make_plan", "detached copies of frozen leaves, for a function by hand",
     untold(MISTAKES, "A detached copy of a frozen parameter looks trainable.",
        ["float32", "float32.frozen"]),
     lambda mesh: [buffer.key for buffer in plan(mesh, detached(fs.make_functional(half_frozen())[1])).units[""].buffers]),
]  # fmt: skip


def half_frozen():
    net = nn.Linear(4, 4)
    net.bias.requires_grad_(False)
    return net


def detached(params):
    return {name: leaf.detach().clone() for name, leaf in params.items()}


# --- Plan -----------------------------------------------------------------------------------------

CASES += [
    ("Plan gather", "the plan in full precision for shards of the other", right(values),
     lambda mesh: fs.gather((s := set_up(mesh, precision=fs.MixedPrecision(torch.bfloat16))).shards,
        s.plan.in_full_precision(), mesh)),
]  # fmt: skip

# --- MixedPrecision -------------------------------------------------------------------------------


class Ids(nn.Module):
    """A model that gets ids as floating-point numbers, and returns them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids):
        return ids.long()


def cast_ids(mesh):
    apply, params, buffers = fs.make_functional(Ids())
    own = plan(mesh, params, precision=fs.MixedPrecision(torch.bfloat16))
    return fs.fully_shard(apply, own, mesh)(fs.shard(params, own, mesh), buffers, torch.tensor([259.0]))


CASES += [
    ("MixedPrecision fully_shard", "ids in a floating-point dtype",
     untold(MISTAKES, "Token ids in a floating-point dtype are cast like other such inputs", torch.tensor([259])), cast_ids),
]  # fmt: skip


# --- schedules and predictions --------------------------------------------------------------------

CASES += [
    ("predict_events", "params instead of a plan", TypeError("plan must be the Plan that make_plan returned"),
     lambda mesh: fs.predict_events(PARAMS)),
    ("predict_events", "a unit that the plan lacks", ValueError("order must name units of the plan; found '9'"),
     lambda s: fs.predict_events(s.plan, ["9"])),
    ("predict_events Schedule", "the schedule of another plan",
     ValueError("the schedule must name units of the plan; found '4'"),
     lambda s: fs.predict_events(s.plan, fs.make_schedule(plan(s.mesh, units=["4"])))),
    ("predict_events", "an operator in micro-batches",
     ValueError("transform='hvp' is of a function that runs once; found micro_batches=2 and forwards=1"),
     lambda s: fs.predict_events(s.plan, accumulate=2, transform="hvp")),
]  # fmt: skip

# --- policies -------------------------------------------------------------------------------------

CASES += [
    ("wrap.by_class", "a class that the model lacks", ValueError("the model is made of Linear"),
     lambda mesh: fs.wrap.by_class(nn.Conv2d)(NET)),
    ("wrap.by_class", "params instead of a module", TypeError("write policy(module)"),
     lambda mesh: fs.wrap.by_class(nn.Linear)(PARAMS)),
    ("wrap.by_size", "params instead of a module", TypeError("write policy(module)"),
     lambda mesh: fs.wrap.by_size(8)(PARAMS)),
    ("wrap.by_size", "no module is so large", right(whole_grads),
     lambda mesh: (s := set_up(mesh, units=fs.wrap.by_size(10**9)(NET))).whole(s.grads())),
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
    ("make_plan", "one rank after forward", right([False]),
     lambda mesh: [unit.reshard_after_forward for unit in plan(mesh, reshard_after_forward=1).unit_list][:1]),
    ("make_plan", "a strategy in the place of options", TypeError("must be a dictionary"),
     lambda mesh: plan(mesh, units={"0": "no_shard"})),
    ("wrap.any_of", "a list of policies", TypeError("any_of(*policies)"), lambda mesh: fs.wrap.any_of([fs.wrap.always()])),
    ("wrap.any_of wrap.Policy", "a policy that returns a plain list", right(LINEARS),
     lambda mesh: [*fs.wrap.any_of(lambda module: ["0"], fs.wrap.always())(NET)]),
]  # fmt: skip


def grouped():
    return fs.wrap.Units(["0", "4"], {"0": {"strategy": "no_shard"}, "4": {"strategy": "no_shard"}}) + [["1", "2"]]  # noqa: RUF005


def not_sharded():
    return fs.wrap.by_function(lambda module: {"strategy": "no_shard"})(NET)


STACKS = {"blocks": {"w": torch.ones(3, 2, 2), "b": torch.ones(3, 2)}, "head": torch.ones(2, 2)}
CASES += [
    ("unstack", "a glob of its leaves", ValueError("found no node 'blocks.*'"), lambda mesh: fs.unstack(STACKS, "blocks.*")),
]  # fmt: skip
