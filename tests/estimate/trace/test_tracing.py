"""A traced step against what must be true of every trace, and folded traces against whole ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard.demo.gpt import GPT, GPTConfig
from funcshard.estimate.trace import tracing
from funcshard.estimate.trace.program import Run, make_program
from funcshard.estimate.trace.tape import Alloc, Call, Form, Free, Grad, Op, Save
from funcshard.estimate.trace.tracing import ModelCall, trace_model
from tests.estimate.chains import expanded
from tests.module.law import Runs


class Layer(nn.Module):
    """A unit with dropout, a residual, and a layer number that says nothing about its form."""

    def __init__(self, number, width=16, p=0.5):
        super().__init__()
        self.layer_idx = number
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(x))))


class RoutedExperts(nn.Module):
    """Modules of one kind inside modules of one kind, which read different rows."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16)) for _ in range(5))

    def forward(self, x):
        rows = x.unflatten(-2, (5, 1)).unbind(-3)
        return x + torch.cat([expert(each) for expert, each in zip(self.experts, rows, strict=True)], -2)


class AllExperts(RoutedExperts):
    def forward(self, x):
        return x + sum(expert(x) for expert in self.experts)


class WeightsOfExperts(RoutedExperts):
    """A layer that reads the weights of modules of one kind without a call of these."""

    def forward(self, x):
        up, down = (torch.stack([expert[i].weight for expert in self.experts]).sum(0) for i in (0, 2))
        return x + F.linear(F.linear(x, up), down) + sum(expert[2].bias for expert in self.experts[:2])


class Chain(RoutedExperts):
    """Modules of one kind in a row, of which the first one reads what is added to the result."""

    def forward(self, x):
        y = x
        for expert in self.experts:
            y = expert(y)
        return x + y


class Rotated(Layer):
    """A layer with a plain tensor, as reference code of Llama holds its rotations, on another device."""

    def __init__(self, number):
        super().__init__(number)
        self.tables = [torch.polar(torch.ones(8), torch.arange(8.0)).to("meta")]

    def forward(self, x):
        rotated = torch.view_as_complex(x.unflatten(-1, (8, 2))) * self.tables[0]
        return super().forward(torch.view_as_real(rotated).flatten(-2))


class Stack(nn.Module):
    """Layers in a row; with ``checkpointed``, those of odd number compute again in backward."""

    def __init__(self, make, number=4, *, checkpointed=0):
        super().__init__()
        self.layers = nn.ModuleList(make(i) for i in range(number))
        self.head = nn.Linear(16, 2)
        self.checkpointed = checkpointed

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            again = self.checkpointed and number % self.checkpointed == 0
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return self.head(x)


def made(run, **parts):
    return Runs(run, **{name: nn.ModuleList(part) if isinstance(part, list) else part for name, part in parts.items()})


def linear(inputs=16, outputs=16):
    return nn.Linear(inputs, outputs)


def two_at_once():
    def run(net, x):
        for i in range(0, 4, 2):
            x = checkpoint(lambda y, i=i: net.layers[i + 1](net.layers[i](y)), x, use_reentrant=False)
        return net.head(x)

    return made(run, layers=[Layer(i) for i in range(4)], head=linear(16, 2))


def tied(*, module=False):
    """Layers that share one weight, or a module, with a layer outside them."""
    net = Stack(Layer, 3)
    if module:
        net.layers[1].up = net.layers[0].up
    net.layers[1].up.weight = net.layers[0].up.weight
    return net


def shared():
    def run(net, x):
        for _ in range(3):
            x = net.layers[0](x)
        return net.head(net.layers[1](x))

    return made(run, layers=[Layer(0), Layer(1)], head=linear(16, 2))


def twice(net, x):
    return net.layer(net.layer(x))


class Checkpoints(nn.Module):
    """A layer that computes a module inside it again in backward, or a function of its weights."""

    def __init__(self, number, whole=True):
        super().__init__()
        self.layer, self.whole = Layer(number), whole

    def forward(self, x):
        return checkpoint(self.layer if self.whole else self.computed, x, use_reentrant=False)

    def computed(self, x):
        up, down = self.layer.up, self.layer.down
        return x + F.linear(F.gelu(F.linear(x, up.weight, up.bias)), down.weight, down.bias)


def in_place(net, x):
    return net.act(net.linear(x)).add_(1)


def lookups(model):
    return (torch.zeros(2, 8, dtype=torch.long),), model


def floats(model):
    return (torch.zeros(3, 5, 16),), model


MODELS = {
    "gpt": lambda: lookups(GPT(GPTConfig(width=16, layers=3, heads=2, context=8))),
    "layers with dropout": lambda: floats(Stack(Layer)),
    "layers of two kinds": lambda: floats(Stack(lambda i: Layer(i, p=0.5 * (i % 2)))),
    "experts with rows of their own": lambda: floats(Stack(lambda _: RoutedExperts(), 3)),
    "experts with the same input": lambda: floats(Stack(lambda _: AllExperts(), 3)),
    "layers with a plain tensor": lambda: floats(Stack(Rotated)),
    "experts whose weights are read": lambda: floats(Stack(lambda _: WeightsOfExperts(), 3)),
    "experts in a row": lambda: floats(Stack(lambda _: Chain(), 2)),
    "every layer checkpointed": lambda: floats(Stack(Layer, checkpointed=1)),
    "every second layer checkpointed": lambda: floats(Stack(Layer, checkpointed=2)),
    "experts checkpointed": lambda: floats(Stack(lambda _: RoutedExperts(), checkpointed=1)),
    "layers with a checkpoint inside": lambda: floats(Stack(Checkpoints)),
    "layers with a function in a checkpoint": lambda: floats(Stack(lambda i: Checkpoints(i, whole=False))),
    "two layers in a checkpoint": lambda: floats(two_at_once()),
    "tied layers": lambda: floats(tied()),
    "layers with a child of another's": lambda: floats(tied(module=True)),
    "one layer three times": lambda: floats(shared()),
    "layers in place": lambda: floats(Stack(lambda _: Runs(in_place, linear=linear(), act=nn.ReLU(inplace=True)))),
    "convolutions": lambda: ((torch.zeros(2, 3, 8, 8),), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())),
    "transformer of torch": lambda: floats(
        nn.Sequential(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, enable_nested_tensor=False),
            nn.Linear(16, 2),
        )
    ),
}


def trace(model, *args, loss=None, **options):
    apply, params, buffers = fs.make_functional(model)
    return trace_model(ModelCall(apply, buffers, args, {}, loss, None, set()), fs.make_plan(params, 1), params, **options)


def tape_of(name, **options):
    args, model = MODELS[name]()
    return trace(model, *args, **options)


def summary(tape):
    """Everything that a program reads from a tape, except for the numbers of storages."""
    live, highest, total, flops, moved, kernels, saved, grads = {}, 0, 0, 0, 0, 0, 0, []
    for event in expanded(tape):
        if isinstance(event, Alloc):
            live[event.storage] = event.bytes
            total += event.bytes
            highest = max(highest, total)
        elif isinstance(event, Free):
            total -= live.pop(event.storage, 0)
        elif isinstance(event, Op):
            flops, moved, kernels = flops + event.flops, moved + event.bytes, kernels + 1
        elif isinstance(event, Save):
            saved += 1
        elif isinstance(event, Grad):
            grads.append(event.path)
    program = make_program(tape, {"": ("",)})
    runs = [(run.what, run.highest.total, run.end.total) for run in program.steps if isinstance(run, Run)]
    return {
        "highest": highest, "flops": flops, "moved": moved, "kernels": kernels, "saved": saved, "grads": sorted(grads),
        "runs": max(each[1] for each in runs), "end": runs[-1][2], "kept": sum(program.saved.values()),
    }  # fmt: skip


@pytest.mark.nightly(one_in=5)
@pytest.mark.parametrize("name", MODELS)
def test_a_folded_trace_says_what_the_whole_one_says_and_every_parameter_gets_a_gradient(name):
    params, folded = {path for path, _ in MODELS[name]()[1].named_parameters()}, summary(tape_of(name))
    assert folded == summary(tape_of(name, fold=False))
    unused = {path for path in params if path.endswith("bias") and ".experts." in path}
    assert set(folded["grads"]) >= params - (unused if name == "experts whose weights are read" else set())
    assert folded["end"] <= 8  # nothing is left but the loss and its gradient, scalars that the caller holds


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("name", ["every layer checkpointed", "layers with dropout", "layers with a checkpoint inside"])
def test_a_folded_trace_of_compiled_modules_says_what_the_whole_one_says(name):
    compiled = {f"layers.{number}" for number in range(4)}
    whole, folded = (summary(tape_of(name, fold=fold, compiled=compiled)) for fold in (False, True))
    assert folded == whole


@pytest.mark.parametrize("inside", [True, False])
def test_a_folded_trace_has_the_gradients_of_a_repeated_module_call_by_call(inside):
    model = Stack(lambda i: Runs(twice, layer=Layer(i))) if inside else shared()
    apart = [f"layers.{number}.layer" for number in range(4)] if inside else ["layers.0"]
    tapes = [trace(model, torch.zeros(3, 5, 16), apart=apart, fold=fold) for fold in (False, True)]
    assert summary(tapes[1]) == summary(tapes[0])
    whole, folded = ([(e.path, e.call) for e in expanded(tape) if isinstance(e, Grad)] for tape in tapes)
    assert folded == whole
    assert len({call for name, call in whole if name.startswith(apart[0])}) == (2 if inside else 3)


@pytest.mark.slow
def test_equal_modules_are_traced_once():
    assert sum(isinstance(event, Call) for event in tape_of("layers with dropout").events) == 2 * 4
    # The input of the first layer requires no gradient, so no other layer is of its kind.
    assert len(tape_of("layers of two kinds").folds) == 3
    for name in ("layers with a checkpoint inside", "layers with a function in a checkpoint"):
        assert [fold.path for fold in tape_of(name).folds] == ["layers.0", "layers.1"]


def test_experts_with_inputs_of_their_own_are_traced_once_in_a_layer():
    paths = [fold.path for fold in tape_of("experts with rows of their own").folds]
    assert paths[:2] == ["layers.0", "layers.0.experts.0"]


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("name", ["experts with the same input", "experts in a row", "experts checkpointed"])
def test_modules_whose_backward_differs_are_not_folded_inside_a_layer(name):
    assert all(fold.path.count(".") == 1 for fold in tape_of(name).folds)


def test_a_transformer_block_keeps_what_the_formula_says():
    # Korthikanti et al., https://arxiv.org/abs/2205.05198, table 2: 34 s·b·h bytes without the attention matrix.
    # Of these, 2 are masks of dropout, which this model lacks. Autograd also keeps the statistics of two norms and
    # of attention.
    s, b, h, heads = 32, 2, 64, 4
    model = GPT(GPTConfig(width=h, layers=2, heads=heads, context=s))
    precision = fs.MixedPrecision(torch.bfloat16, torch.float32)
    profile = fs.profile(*fs.make_functional(model), torch.zeros(b, s, dtype=torch.long), precision=precision)
    plan = fs.make_plan(profile.forms, 2, units=["blocks.*"], precision=precision)
    norms, attention = 2 * 2 * 2 * s * b, 4 * s * b * heads + 24  # and the state of its random numbers
    assert profile.program(plan).saved["blocks.1"] == 32 * s * b * h + norms + attention


def test_a_loss_without_parameters_is_refused():
    with pytest.raises(ValueError, match="require no gradient, so there is no backward to trace"):
        trace(nn.Linear(2, 2).requires_grad_(False), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="does not depend on a trainable parameter"):
        trace(nn.Linear(2, 2), torch.zeros(1, 2), loss=lambda out: torch.zeros(()))


def test_a_folded_trace_keeps_no_input_of_a_checkpoint_longer_than_the_checkpoint():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()).requires_grad_(False) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(8, 64))
    whole, folded = (summary(trace(model, torch.zeros(16, 8), remat=["0", "1"], fold=fold)) for fold in (False, True))
    assert folded == whole


def test_one_recomputed_layer_leaves_the_others_folded():
    pairs = [[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)] for _ in range(4)]
    model = nn.Sequential(*(nn.Sequential(*pair) for pair in pairs))
    whole, folded = (trace(model, torch.zeros(16, 8), remat=["0"], fold=fold) for fold in (False, True))
    assert summary(folded) == summary(whole)
    assert "1" in [fold.path for fold in folded.folds]


class Repeats(nn.Module):
    """A module that repeats its product as often as a function of its attributes says."""

    def __init__(self, count, **attributes):
        super().__init__()
        self.linear, self.act, self.count = linear(), nn.Identity(), count
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        for _ in range(self.count(self)):
            x = torch.tanh(self.linear(x))
        return x


class HasDepth(Repeats):
    depth = 1


def counted(module):
    """Set an attribute in which a module differs from others, and read it."""
    module.depth += 1
    return module.depth


class Settings:
    def __init__(self, steps):
        self.steps = steps


def multiplied(net, x, y):
    return torch.tanh(net.a(x) * net.b(y))


def two():
    return Runs(multiplied, a=linear(), b=linear())


def block():
    return nn.Sequential(linear(), nn.GELU())


def reads(same=()):
    """Modules of two inputs; ``same`` are those that read one tensor twice."""

    def run(net, x):
        x = net.first(x)
        memory = net.memory(x)
        for number, each in enumerate(net.blocks):
            x = each(x, x if number in same else memory)
        return x

    return made(run, first=linear(), memory=linear(), blocks=[two() for _ in range(4)])


def skips():
    """A U-Net: what comes down is read again on the way up."""

    def run(net, x):
        x, seen = net.first(x), []
        for each in net.down:
            x = each(x)
            seen.append(x)
        for each in net.up:
            x = each(x, seen.pop())
        return x

    return made(run, first=linear(), down=[block() for _ in range(3)], up=[two() for _ in range(3)])


def in_a_row(net, x, *more):
    x = net.first(x)
    for each in net.blocks:
        x = each(x, *more)
    return x


def keeps(net, x, cache):
    """Append the result to a list that the caller passes, as to a cache."""
    x = net.block(x)
    cache.append(x * 2)
    return x


def with_cache():
    def run(net, x):
        x = in_a_row(net, x, cache := [])
        return x, torch.cat(cache)

    return made(run, first=linear(), blocks=[Runs(keeps, block=block()) for _ in range(4)])


def leaves(net, x):
    """Leave the result as an attribute."""
    x = net.block(x)
    net.last = x * 2
    return x


def with_attributes():
    def run(net, x):
        in_a_row(net, x)
        return sum(each.last for each in net.blocks)

    return made(run, first=linear(), blocks=[Runs(leaves, block=block()) for _ in range(4)])


def with_hooks():
    """Modules of which a hook collects what modules inside them return."""

    def run(net, x):
        seen = []
        for each in net.blocks:
            each[0].register_forward_hook(lambda module, args, out: seen.append(out * 2))
        return in_a_row(net, x) + sum(seen)

    return made(run, first=linear(), blocks=[block() for _ in range(4)])


def containers():
    """Containers of one kind, whose modules are called one by one, and weights read from outside."""

    def run(net, x):
        for each in (net.first, net.second):
            x = each["b"](each["a"](x))
        for each in net.blocks:
            x = each(x).to(each[0].weight.dtype)
        return x + F.linear(x, net.blocks[2][0].weight)

    pairs = {name: nn.ModuleDict({"a": linear(), "b": linear()}) for name in ("first", "second")}
    return made(run, **pairs, blocks=[block() for _ in range(3)])


def transposed():
    """Layers whose gradients have other strides than their inputs."""

    def run(net, x):
        x = net.first(x).transpose(0, 1).contiguous().transpose(0, 1)
        for layer in net.layers:
            x = layer(x)
        return net.norm(x)

    return made(run, first=linear(), layers=[Layer(i) for i in range(3)], norm=nn.LayerNorm(16))


def repeats(count, name, *values, kind=Repeats):
    return nn.Sequential(linear(), *(kind(count, **{name: value}) for value in values))


def weighted(net, x):
    """Return what the result is made of too."""
    weights = net.block(x).softmax(-1)
    return x * weights, weights


def with_weights():
    def run(net, x):
        x = net.first(x)
        for each in net.blocks:
            x, _ = each(x)
        return net.last(x)

    return made(run, first=linear(), last=linear(), blocks=[Runs(weighted, block=block()) for _ in range(4)])


class Scaled(Layer):
    """A layer whose backward needs a buffer."""

    def __init__(self, number):
        super().__init__(number)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        return super().forward(x) * self.scale


ALIKE = {
    "an output that the module reads": with_weights,
    "a buffer that autograd keeps": lambda: nn.Sequential(linear(), *map(Scaled, range(4)), linear()),
    "a depth that is no number of a layer": lambda: repeats(lambda m: m.depth, "depth", 1, 8, 8),
    "configurations of one class": lambda: repeats(lambda m: m.config.steps, "config", *map(Settings, (1, 8, 8))),
    "a ratio": lambda: repeats(lambda m: int(8 * m.ratio), "ratio", 0.25, 1.0, 1.0),
    "the number of a layer that forward reads": lambda: repeats(
        lambda m: 1 + 2 * (m.layer_idx % 2), "layer_idx", 0, 1, 2, 3
    ),
    "functions with closures": lambda: repeats(lambda m: m.function(), "function", *((lambda i=i: i) for i in (1, 4, 4))),
    "an attribute that forward sets": lambda: repeats(counted, "depth", 1, 3, 3),
    "an attribute that the class has": lambda: repeats(lambda m: m.depth, "depth", 1, 4, 4, kind=HasDepth),
    "the first module reads a tensor twice": lambda: reads((0,)),
    "the last module reads a tensor twice": lambda: reads((3,)),
    "modules that read one tensor": reads,
    "skips": skips,
    "a cache": with_cache,
    "attributes that stay": with_attributes,
    "hooks of a call": with_hooks,
    "containers": containers,
    "gradients in another layout": transposed,
}


@pytest.mark.nightly(one_in=4)
@pytest.mark.parametrize("name", ALIKE)
def test_one_module_stands_for_others_only_if_they_trace_alike(name):
    folded, whole = (summary(trace(ALIKE[name](), torch.zeros(8, 4, 16), fold=fold)) for fold in (True, False))
    assert folded == whole


@pytest.mark.parametrize(
    ("name", "number"),
    [("a ratio", 2), ("the number of a layer that forward reads", 4), ("functions with closures", 2)],
)
def test_modules_that_read_equal_values_are_traced_once(name, number):
    assert len(trace(ALIKE[name](), torch.zeros(8, 4, 16)).folds) == number


@pytest.mark.parametrize("cast", [False, True])
def test_a_trace_casts_the_inputs_of_a_unit_where_a_run_does(cast):
    seen = set()

    def scaled(net, x, scale):  # the caller made the scale
        seen.add(scale.dtype)
        return net.linear(x) * scale.to(x.dtype)

    model = Runs(lambda net, x: net.unit(x, torch.ones(4)), unit=Runs(scaled, linear=linear(4, 4)))
    apply, params, buffers = fs.make_functional(model)
    plan = fs.make_plan(params, 1, units=["unit"], precision=fs.MixedPrecision(torch.bfloat16, cast_forward_inputs=cast))
    fs.profile(apply, params, buffers, torch.zeros(2, 4), precision=plan)
    fs.fully_shard(apply, plan, fs.Mesh())(fs.shard(params, plan, fs.Mesh()), buffers, torch.zeros(2, 4))
    assert seen == {torch.bfloat16 if cast else torch.float32}


def test_memory_that_nothing_writes_is_no_work():
    class Empty(nn.Linear):
        def forward(self, x):
            torch.empty(1 << 20).zero_()
            torch.empty(1 << 20)
            return super().forward(x)

    moved = []
    for cls in (nn.Linear, Empty):
        events = trace(cls(16, 16), torch.zeros(8, 16)).events
        moved.append([event.bytes for event in events if isinstance(event, Op)])
    assert moved[1] == [4 << 20, *moved[0]]  # zero_ writes once and reads nothing


def test_grouped_products_have_the_flops_of_all_their_rows():
    weight = nn.Parameter(torch.zeros(4, 16, 32, dtype=torch.bfloat16))
    # Products of groups of rows, as a mixture of experts computes them.
    grouped = Runs(lambda net, x, ends: F.grouped_mm(x, net.weight, offs=ends), weight=weight)
    x = torch.zeros(64, 16, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.zeros(4, dtype=torch.int32)
    profile = fs.profile(*fs.make_functional(grouped), x, ends, loss=lambda out: (out * out).sum())
    assert profile.forward_flops == 2 * 64 * 16 * 32
    flops = [event.flops for event in expanded(profile.tape()) if isinstance(event, Op) and event.flops]
    assert flops == [2 * 64 * 16 * 32] * 2  # forward, and the gradient of the weight


def test_an_operator_whose_flops_nobody_counts_is_named():
    spectrum = Runs(lambda net, x: torch.fft.rfft(net.linear(x)).abs(), linear=linear(8, 8))
    with pytest.warns(UserWarning, match=r"(?s)no FLOPs are counted for aten::_fft_.2c.*register_flop_formula"):
        fs.profile(*fs.make_functional(spectrum), torch.zeros(2, 8))


def test_a_model_may_decide_by_whole_numbers_that_depend_on_no_input():
    def masked(net, x):
        """Make a mask only if the positions are not those of one sequence."""
        positions = torch.arange(x.shape[0])[None]
        starts = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
        if (starts.cumsum(-1)[:, -1] == 0).all():
            return net.linear(x)
        return net.linear(x) * (positions[:, :, None] == positions[:, None, :]).sum()

    assert fs.profile(*fs.make_functional(Runs(masked, linear=linear(8, 8))), torch.zeros(64, 8)).saved == 0


@pytest.mark.parametrize(
    ("stride", "expected"), [((3, 1), (3, 1)), ((1, 2), (1, 2)), ((6, 1), (3, 1))], ids=["rows", "columns", "with gaps"]
)
def test_a_gradient_has_the_layout_of_its_tensor_without_gaps(stride: tuple[int, int], expected: tuple[int, int]) -> None:
    assert Form((2, 3), stride, torch.float32, True).gradient().stride() == expected


class Sharing(nn.Module):
    """Layers that all read the first state, as decoder layers read those of an encoder."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Runs(lambda m, x, y: m.linear(x) * y, linear=nn.Linear(8, 8)) for _ in range(5))

    def forward(self, x):
        x = start = self.first(x)
        for layer in self.layers:
            x = layer(x, start)
        return x


@pytest.mark.parametrize("name", ["an input that layers share", *list(ALIKE)[:2]])
def test_one_attempt_folds_layers(monkeypatch, name):
    attempts = []
    model, x = (Sharing(), torch.zeros(2, 8)) if name not in ALIKE else (ALIKE[name](), torch.zeros(8, 4, 16))

    class Counted(tracing._Tracer):
        def __init__(self, *arguments):
            attempts.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(tracing, "_Tracer", Counted)
    fs.profile(*fs.make_functional(model), x)
    assert len(attempts) == 1
