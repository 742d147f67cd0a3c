"""The skeleton: every call gets its own modules, however one module refers to another."""

import collections
import copy
import functools
import pickle
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import funcshard as fs
from funcshard._utils.process_state import without_collection
from funcshard.module.splitting import make_skeleton
from tests.core.units import forward_mode
from tests.module.law import Runs, check_equal

x = torch.randn(4, 3)


def check_own(module: nn.Module) -> None:
    """Check that a function has the outputs of its module, and computes with no parameters but those given."""
    out = module(x)
    apply, params, buffers = fs.make_functional(module)
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    assert torch.equal(apply(params, buffers, x), out)
    assert torch.equal(apply(zeros, buffers, x), torch.zeros(4, 3))
    assert torch.equal(apply(params, buffers, x), out)


def held(hold: Callable[[nn.Module], Any], call: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a module whose forward reaches its layer through ``way``, an attribute made by a function."""
    module = Runs(lambda m, x: call(m.way, x), lin=nn.Linear(3, 3))
    module.way = hold(module)
    return module


class Two(NamedTuple):
    layer: Any
    factor: float


def _global(m: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of another file, such as a notebook, with the module's method in a global variable."""
    file: dict[str, Any] = {"old": m.lin.forward}
    exec("way = lambda x: old(x)", file)
    return file["way"]


def _parameters(m: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = m.lin.weight, m.lin.bias
    return lambda x: nn.functional.linear(x, weight, bias)


WAYS: dict[str, tuple[Callable, Callable]] = {
    "module": (lambda m: m.lin, lambda way, x: way(x)),
    "bound method": (lambda m: types.MethodType(lambda self, x: self.lin(x), m), lambda way, x: way(x)),
    "bound method of a child": (lambda m: m.lin.forward, lambda way, x: way(x)),
    "partial": (lambda m: functools.partial(m.lin), lambda way, x: way(x)),
    "namedtuple": (lambda m: Two(m.lin, 1.0), lambda way, x: way.layer(x)),
    "deque": (lambda m: collections.deque([m.lin]), lambda way, x: way[0](x)),
    "object": (lambda m: types.SimpleNamespace(module=m), lambda way, x: way.module.lin(x)),
    "weak reference": (lambda m: weakref.ref(m.lin), lambda way, x: way()(x)),
    "closure": (lambda m: lambda x: m.lin(x), lambda way, x: way(x)),
    "global variable": (_global, lambda way, x: way(x)),
    "closure over parameters": (_parameters, lambda way, x: way(x)),
    "list of parameters": (lambda m: [m.lin.weight, m.lin.bias], lambda way, x: nn.functional.linear(x, *way)),
    "parameter by itself": (
        lambda m: m.__dict__.update(w=m.lin.weight) or m.__dict__["w"],
        lambda way, x: nn.functional.linear(x, way),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_reference_to_a_module_leads_to_the_calls_own_module_or_is_refused(way: str) -> None:
    if way in ("weak reference", "global variable"):
        words = (
            r"attribute 'way' of module '\(root\)' refers to a module .* a global variable or a weak reference: .*"
            r"types\.MethodType\(function, module\)"
        )
        with pytest.raises(TypeError, match=words):
            fs.make_functional(held(*WAYS[way]))
    else:
        check_own(held(*WAYS[way]))


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (list, lambda kept: kept.append(1) or len(kept)),
    "list in a tuple": (lambda: ([],), lambda kept: kept[0].append(1) or len(kept[0])),
    "set": (set, lambda kept: kept.add(len(kept)) or len(kept)),
    "Counter": (collections.Counter, lambda kept: kept.update(a=1) or kept["a"]),
    "defaultdict": (lambda: collections.defaultdict(list), lambda kept: kept["a"].append(1) or len(kept["a"])),
    "tensor": (lambda: torch.zeros(()), lambda kept: kept.add_(1).item()),
    "object": (lambda: types.SimpleNamespace(n=0), lambda kept: setattr(kept, "n", kept.n + 1) or kept.n),
}


# How a call of a function runs.
TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad_and_value(f)(x)[1],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[0],
    "vmap": lambda f, x: torch.vmap(f, randomness="different")(x[None])[0],
    "jvp of grad": lambda f, x: torch.func.jvp(lambda x: torch.func.grad_and_value(f)(x)[1], (x,), (x,))[0],
}


@forward_mode
@pytest.mark.parametrize("keep", [lambda g: g, lambda g: [g]], ids=["by itself", "in a list"])
@pytest.mark.parametrize("run", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_generator_of_the_module_is_copied_inside_transforms(run: Any, keep: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        generator = m.kept[0] if isinstance(m.kept, list) else m.kept
        return (m.lin(x) * torch.rand(3, generator=generator)).sum()

    module = Runs(forward, lin=nn.Linear(3, 3))
    module.kept = keep(torch.Generator().manual_seed(1))
    apply, params, buffers = fs.make_functional(module)
    f, x = lambda x: apply(params, buffers, x), torch.ones(3)
    expected = (module.lin(x) * torch.rand(3, generator=torch.Generator().manual_seed(1))).sum()
    for _ in range(2):  # every call begins with the state of make_functional
        torch.testing.assert_close(run(f, x), expected)


@pytest.mark.filterwarnings("ignore:the forward of .* set attributes of the module")
@pytest.mark.parametrize(("make", "count"), COUNTERS.values(), ids=COUNTERS)
def test_changes_of_attributes_stay_in_the_call(make: Any, count: Any) -> None:
    module = Runs(lambda m: float(count(m.kept)))
    module.kept = make()
    apply, params, buffers = fs.make_functional(module)
    assert [apply(params, buffers) for _ in range(3)] == [1.0, 1.0, 1.0]
    assert module() == 1.0
    assert apply(params, buffers) == 1.0


def test_a_module_that_has_run_and_keeps_its_output() -> None:
    module = Runs(lambda m, x: (setattr(m, "last", m.lin(x)), m.last)[1], lin=nn.Linear(3, 3))
    module(x)
    check_own(module)


class Recorder(list):
    """A hook that keeps what it sees."""

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        self.append(out.detach().sum())
        return out * len(self)


def test_a_hook_runs_on_the_calls_own_module_and_keeps_tensors_of_its_call() -> None:
    recorder = Recorder([torch.zeros(())])
    module = Runs(lambda m, x: m.lin(x), lin=nn.Linear(3, 3), factor=nn.Parameter(torch.full((), 3.0)))
    module.lin.register_forward_hook(types.MethodType(lambda m, lin, args, out: out * m.factor, module))
    module.lin.register_forward_hook(recorder)
    apply, params, buffers = fs.make_functional(module)
    for values in (params, {name: value.detach() / 2 for name, value in params.items()}):
        out = torch.nn.functional.linear(x, values["lin.weight"], values["lin.bias"]) * values["factor"] * 2
        assert all(torch.equal(apply(values, buffers, x), out) for _ in range(2))
    assert len(recorder) == 1


def test_nothing_refers_to_the_module_once_the_function_is_made_and_the_skeleton_holds_no_values() -> None:
    module = nn.Sequential(nn.Linear(300, 300), Referring(), nn.BatchNorm1d(2))
    with without_collection():  # a cycle would wait for a search
        apply, _, _ = fs.make_functional(module)
        gone = [weakref.ref(m) for m in module.modules()]
        del module
        assert [each() for each in gone] == [None] * 5
    held = [value for m in apply.skeleton.template.modules() for value in (*m.parameters(), *m.buffers())]
    assert all(value.is_meta and value.numel() == 0 for value in held)


class Referring(nn.Module):
    """A module of which each call needs copies of attributes: a method of a child, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))
        self.run, self.held = self.lin.forward, [self.lin.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x) + self.held[0] + self.shift


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda apply: pickle.loads(pickle.dumps(apply)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_function_is_the_same_function(copied) -> None:
    module = Referring()
    apply, params, buffers = fs.make_functional(module)
    again = copied(apply)
    for values in (params, {name: value.detach() * 2 for name, value in params.items()}):
        assert torch.equal(again(values, buffers, x), apply(values, buffers, x))
    plan = fs.make_plan(params, fs.Mesh(), units=["lin"])
    assert again.skeleton.paths() == apply.skeleton.paths() == {"": 0, "lin": 1}
    assert fs.fully_shard(again, plan, fs.Mesh()).units.keys() == {"lin"}


KEPT: dict[str, tuple[Callable[[fs.Mesh], Any], Callable[[Any], fs.Mesh]]] = {
    "a mesh of one axis": (lambda mesh: mesh["tensor"], lambda kept: kept),
    "in a list in a dictionary": (lambda mesh: {"meshes": [mesh]}, lambda kept: kept["meshes"][0]),
    "in a closure": (lambda mesh: lambda: mesh, lambda kept: kept()),
}


@pytest.mark.parametrize(("keep", "mesh_of"), KEPT.values(), ids=KEPT)
def test_a_module_may_keep_its_mesh_which_no_call_copies(keep: Any, mesh_of: Any) -> None:
    def main(mesh: fs.Mesh) -> torch.Tensor:
        net = Runs(lambda m, x: fs.psum(m.lin(x), mesh_of(m.kept), axis="tensor"), lin=nn.Linear(3, 3))
        net.kept = mesh
        assert make_skeleton(net)[0].copied_attributes == ()
        net.kept = keep(mesh)
        assert mesh_of(copy.deepcopy(net).kept).groups["tensor"] is mesh.groups["tensor"]
        apply, params, buffers = fs.make_functional(net)
        return apply(params, buffers, x) - net.lin(x)  # the other rank's output

    first, second = fs.simulate(main, {"tensor": 2})
    torch.testing.assert_close(first, second)


HOOKS = (
    "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_post_hook",
    "state_dict_pre_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook",
)  # fmt: skip


def hooking(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Register hooks of every kind, as models do that capture their outputs."""
    note = lambda *args, **kwargs: m.ran.append(1)  # noqa: E731
    m.handles += [getattr(m.lin, f"register_{kind}")(note) for kind in HOOKS]
    m.handles.append(m.lin.register_forward_hook(note, with_kwargs=True, always_call=True))
    m.handles.append(m.lin.register_forward_pre_hook(note, with_kwargs=True, prepend=True))
    m.lin.register_buffer("late", torch.zeros(()), persistent=False)
    return m.lin(x) * len(m.ran)


def _lengths(module: nn.Module) -> list[dict[str, int]]:
    return [{k: len(v) for k, v in m.__dict__.items() if hasattr(v, "__len__")} for m in module.modules()]


def test_hooks_that_a_call_registers_end_with_it() -> None:
    module = Runs(hooking, lin=nn.Linear(3, 3), handles=[], ran=[])
    apply, params, buffers = fs.make_functional(module)
    before = _lengths(apply.skeleton.template)
    assert all(torch.equal(apply(params, buffers, x), module.lin(x) * 4) for _ in range(3))
    assert _lengths(apply.skeleton.template) == before == _lengths(module)


def test_a_handle_that_the_module_keeps_removes_the_hook_of_its_call() -> None:
    module = Runs(lambda m, x: (m.lin(x), m.handle.remove(), m.lin(x))[::2], lin=nn.Linear(3, 3))
    module.handle = module.lin.register_forward_hook(lambda m, args, out: out * 2)
    apply, params, buffers = fs.make_functional(module)
    alone = module.lin.forward(x)
    for _ in range(3):
        assert torch.equal(torch.stack(apply(params, buffers, x)), torch.stack([alone * 2, alone]))
    assert len(module.lin._forward_hooks) == 1
    module.handle.remove()
    assert torch.equal(torch.stack(apply(params, buffers, x)), torch.stack([alone * 2, alone]))


def _around(m: nn.Module) -> None:
    old = m.forward
    m.forward = types.MethodType(lambda self, x: old(x) * 2, m)


def _in_defaults(m: nn.Module) -> None:
    def forward(self: nn.Module, x: torch.Tensor, old: Any = m.forward, *, other: Any = m.forward) -> torch.Tensor:
        return old(x) + 3 * other(x)

    m.forward = types.MethodType(forward, m)


def _in_a_partial(m: nn.Module) -> None:
    function = lambda self, x, old: old(x) * 2  # noqa: E731
    m.forward = types.MethodType(functools.partial(function, old=m.forward), m)


def _in_a_list(m: nn.Module) -> None:
    _around(m)
    m.ways = {"a": [m.forward]}
    m.forward = types.MethodType(lambda self, x: self.ways["a"][0](x), m)


def _never_called(m: nn.Module) -> None:
    m.extra_repr = types.MethodType(functools.partial(lambda self, old: f"{old()}, cut", old=m.extra_repr), m)


METHODS = [_around, _in_defaults, _in_a_partial, _in_a_list, _never_called]


@pytest.mark.parametrize("patch", METHODS)
def test_a_bound_method_around_the_modules_own_method_runs_on_the_calls_own_module(patch: Any) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    patch(module[0])
    check_own(module)
    check_equal(module, x, ["0", "1"], how={"remat": ["0"]})


class MakesChildren(nn.Module):
    """A module whose ``__setstate__`` makes its child and its buffer again, as modules of e3nn do."""

    def __init__(self) -> None:
        super().__init__()
        self.make({"scale": torch.full((3,), 2.0)})

    def make(self, values: dict[str, torch.Tensor]) -> None:
        self.lin = nn.Linear(3, 3)
        self.lin.register_buffer("scale", torch.zeros(3))
        self.lin.load_state_dict(values, strict=False)

    def __getstate__(self) -> dict[str, Any]:
        saved = {name: value.detach().clone() for name, value in self.lin.state_dict().items()}
        return {**self.__dict__, "_modules": {}, "_saved": saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved")
        self.__dict__.update(state)
        self.make(saved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.lin.scale


def test_a_module_whose_pickle_makes_other_children() -> None:
    check_own(nn.Sequential(MakesChildren(), nn.Linear(3, 3)))


def test_a_module_that_needs_arguments_when_it_is_made() -> None:
    class Around(nn.Module):  # as EMA of ema_pytorch is
        def __new__(cls, module: nn.Module) -> Any:
            return super().__new__(cls)

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    check_own(Around(nn.Linear(3, 3)))


def test_an_attribute_that_has_no_copy_is_named() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    module[1].writer = {"queue": threading.Lock()}  # as a SummaryWriter has
    with pytest.raises(TypeError, match=r"attribute 'writer' of Tanh has no copy \(cannot pickle .*: keep it outside"):
        fs.make_functional(module)


def test_a_module_whose_pickle_leaves_out_what_cannot_be_copied() -> None:
    class Locked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.lock = threading.Lock()

        def __getstate__(self) -> dict[str, Any]:
            return {key: value for key, value in self.__dict__.items() if key != "lock"}

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            self.lock = None

    check_own(Locked())


class Tables(nn.Module):
    """Holds large tensors in attributes and a buffer, and writes to them where it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.table, self.more = nn.Linear(3, 3), torch.zeros(40_000), [torch.zeros(40_000)]
        self.whole = torch.zeros(2, 40_000)
        self.row = self.whole[1]
        self.register_buffer("seen", torch.zeros(40_000))
        self.register_buffer("known", torch.zeros(40_000), persistent=False)

    def forward(self, x: torch.Tensor, write: bool) -> torch.Tensor:
        if write:
            for tensor in (self.table, self.more[0], self.whole, self.seen, self.known[1:]):
                tensor += 1
            F.batch_norm(torch.randn(4, 40_000), self.seen, torch.ones(40_000), training=True)  # counts no version
        sums = self.table.sum() + self.more[0].sum() + self.whole[1].sum() + self.row.sum() + self.known[-1]
        return self.lin(x) + sums + self.seen[0]


@pytest.mark.filterwarnings("ignore:the forward of .* (set attributes|changed buffers) of the module")
@pytest.mark.parametrize("mutable", [False, True])
def test_large_tensors_are_copied_when_a_call_writes_to_them(mutable: bool) -> None:
    module = Tables()
    apply, params, buffers = fs.make_functional(module, mutable=mutable)
    calls = [apply(params, buffers, x, write) for write in (False, True, False, True, False)]
    outs = [call[0] for call in calls] if mutable else calls
    assert torch.equal(outs[0], module.lin(x))
    assert all(torch.equal(out, outs[0]) for out in outs[2::2])
    assert torch.allclose(outs[1], module.lin(x) + 4 * 40_000 + 1 + 0.9, atol=1.0)
    assert not any(tensor.count_nonzero() for tensor in (*buffers.values(), module.table, module.whole))
    if mutable:
        assert calls[1][1]["known"].sum() == 39_999
        calls[1][1]["known"].zero_()
        calls[0][1]["known"].add_(1)
        assert calls[3][1]["known"].sum() == 39_999
        assert not buffers["known"].count_nonzero()


TABLES: dict[str, tuple[Any, Any]] = {
    "buffer": (nn.Buffer, lambda kept: kept),
    "attribute": (lambda table: table, lambda kept: kept),
    "list": (lambda table: [table], lambda kept: kept[0]),
    "dictionary": (lambda table: {"a": table}, lambda kept: kept["a"]),
}


@pytest.mark.parametrize(("keep", "look"), TABLES.values(), ids=TABLES)
def test_a_large_tensor_that_no_call_writes_to_is_not_copied(keep: Any, look: Any) -> None:
    module = Runs(lambda m, x: m.lin(x) + look(m.table)[0], lin=nn.Linear(3, 3))
    module.table = keep(torch.zeros(2**20))
    apply, params, buffers = fs.make_functional(module)
    apply(params, buffers, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        apply(params, buffers, x)
    assert max(event.cpu_memory_usage for event in profile.events()) < 2**18
