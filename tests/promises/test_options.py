"""Every option that is a number, a count or a flag is right, or an error that names it.

The error comes before anything is communicated: the mesh of these cases cannot communicate. It
names the option, the rule, the value found, and a remedy.
"""

import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import funcshard as fs
from funcshard.graph import Traced
from funcshard.module.functional import Functional
from funcshard.testing import delayed
from funcshard.train.train_step import TrainStep

PARAMS = {"a": torch.ones(4), "b": torch.ones(3, 3)}


class Silent:
    """A group of two ranks that cannot communicate."""

    rank, size, global_rank = 0, 2, 0

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"{name} was called before the option was checked")

        return refuse


class Setting(NamedTuple):
    """What a call needs besides the option; with ``ranks=2`` every communication is an error."""

    mesh: fs.Mesh
    plan: fs.Plan
    shards: Any
    folder: Any

    @classmethod
    def of(cls, ranks: int, folder: Any) -> "Setting":
        mesh = fs.Mesh() if ranks == 1 else fs.Mesh({"shard": Silent()})  # type: ignore[arg-type]
        plan = fs.make_plan(PARAMS, ranks, units=["a", "b"])
        shards = {u.name: {b.key: torch.ones(b.shard_numel) for b in u.buffers} for u in plan.unit_list}
        return cls(mesh, plan, shards, folder)


class Rule(NamedTuple):
    """A rule of options: its words, values and types that break it, and values that keep it."""

    words: str
    bad_values: tuple[Any, ...]
    bad_types: tuple[Any, ...]
    good: tuple[Any, ...]


NO_NUMBERS = (None, True, "2", [1], torch.tensor([1]), torch.tensor(True), np.bool_(True), 1j)
NEVER = (math.nan, -math.inf, -7)


def count(least: int, of: str, most: int = 2) -> Rule:
    words = rf"must be a whole number of {of}, at least {least}"
    bad = (least - 1, 1.5, 2.0, math.inf, *NEVER, np.float64(2), torch.tensor(1.5))
    return Rule(words, bad, NO_NUMBERS, (max(least, 1), most, np.int64(most), torch.tensor(most)))


def positive(infinite: bool = False) -> Rule:
    words = r"must be a number above 0, or math\.inf" if infinite else r"must be a finite number above 0"
    bad = (0, 0.0, -0.0, torch.tensor(-1.0), np.float32(-1), *NEVER, *([] if infinite else [math.inf]))
    return Rule(words, bad, NO_NUMBERS, (1, 0.5, np.float32(0.5), torch.tensor(0.5), *([math.inf] if infinite else [])))


def choice(*choices: str | None) -> Rule:
    return Rule("must be '.*' or ", ("never", "EACH", ""), (1, True, ["each"], torch.tensor(1)), choices)


REDUCE = choice("each", "once", "shard_each")
BUCKET = count(0, "bytes")._replace(good=(0, 2, np.int64(2), torch.tensor(2), "auto"))
FLAG = Rule("must be True or False", (), (1, 0, None, "no", "False", np.bool_(True), torch.tensor(True)), (True, False))
FREED = count(1, "ranks")._replace(
    bad_types=(None, "2", [1], torch.tensor([1]), torch.tensor(True), np.bool_(True), 1j),
    good=(True, False, 1, 2, np.int64(2), torch.tensor(2)),
)
REMAT = Rule(
    "must be a list of names or globs of units, True or False", (), (1, 0, None, "no", np.bool_(True)), (True, False, [])
)
FROM_ZERO = Rule("must be a finite number, at least 0", (-1e-300, math.inf, *NEVER), NO_NUMBERS, (0, 0.0, 1e-3))
# torch.optim takes a rate of shape [1] too.
RATE = FROM_ZERO._replace(bad_types=(None, True, "2", [1], 1j), good=(0.0, 1e-3, torch.tensor(0.1), torch.tensor([0.1])))
FACTOR = Rule("must be a finite number above 1", (1.0, 0.5, math.inf, *NEVER), NO_NUMBERS, (2, 1.5, np.float64(1.5)))
PART = Rule("must be a finite number above 0 and below 1", (0.0, 1, 2.0, *NEVER), NO_NUMBERS, (0.5, np.float32(0.5)))
SCALE = Rule("must be a finite number, at least 1.175", (0.0, 1e-40, 1e39, math.inf, *NEVER), NO_NUMBERS, (1, 2.0**16))
RANKS = Rule("must be (a number|whole numbers) of ranks", (0, -1, 2.0, math.nan, True, "2", None), (), (1, np.int64(1)))
SHAPE = Rule(
    "axes must be whole numbers of ranks",
    ({"shard": 0}, {"shard": 1.0}, {"shard": True}, {"shard": -1}),
    (),
    ({"shard": 1},),
)
SIZE = Rule(
    "must be (a whole number|a number) of bytes", (0, -1, 1.5, math.nan, math.inf, "5", "1.5GB", "-1GB", "0MB"),
    (True, None, [1]), (1, "5GB", "1 KB", np.int64(9)),
)  # fmt: skip


DIM = Rule("must be the number of a dimension", (1, -2, 7), (None, True, "0", [0], 0.0, math.nan), (0, -1, np.int64(0)))
PERM = Rule("must be pairs", (None, 1, [0], [(0,)], [(0, 7)], [(0, 0), (0, 1)], [(0.0, 1)]), (), ([], [(0, 0)], {(0, 0)}))


class Case(NamedTuple):
    """An option: a call with a value of it, and its rule; ``none`` if ``None`` is a value of it."""

    call: Callable[[Setting, Any], Any]
    rule: Rule
    none: bool = False


def grads(s: Setting) -> tuple[Any, fs.Plan, fs.Mesh]:
    return s.shards, s.plan, s.mesh


class Net(torch.nn.Module):
    """A module on meta with parameters as in ``PARAMS``."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in PARAMS.items():
            self.register_parameter(name, torch.nn.Parameter(value.to("meta")))


def saved_by_dcp(s: Setting) -> Any:
    plan, mesh = fs.make_plan(PARAMS, 1), fs.Mesh()  # the files of save are those of torch.distributed.checkpoint
    fs.save(s.folder / "saved", fs.shard(PARAMS, plan, mesh), plan, mesh)
    return s.folder / "saved"


@functools.cache
def hugging_face() -> tuple[Any, Any, fs.Plan]:
    """Return the function, the shards and the plan of a model of Hugging Face."""
    transformers = importlib.import_module("transformers")  # imported here because it takes seconds
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=2, vocab_size=3, bos_token_id=0, eos_token_id=0)
    apply, params, _ = fs.make_functional(transformers.GPT2LMHeadModel(config))
    plan = fs.make_plan(params, 1)
    return apply, fs.shard(params, plan, fs.Mesh()), plan


def exported(s: Setting) -> Any:
    plan, mesh = fs.make_plan(PARAMS, 1), fs.Mesh()
    fs.export_safetensors(s.folder / "of one rank", fs.shard(PARAMS, plan, mesh), plan, mesh)
    return s.folder / "of one rank"


def loss(shards: Any, *rest: Any) -> torch.Tensor:
    return sum(t.sum() for own in shards.values() for t in own.values())  # type: ignore[return-value]


SGD = fs.torch_optimizer(torch.optim.SGD, lr=0.1)


def train(name: str) -> Callable[[Setting, Any], Any]:
    return lambda s, v: fs.make_train_step(loss, SGD, s.plan, s.mesh, **{name: v})


def of_state_dict(name: str) -> Callable[[Setting, Any], Any]:
    return lambda s, v: fs.to_state_dict(*grads(s), **{name: v})


def of_optimizer_dict(name: str) -> Callable[[Setting, Any], Any]:
    return lambda s, v: fs.optimizer_to_state_dict(SGD.init(s.shards), SGD, s.plan, s.mesh, **{name: v})


def collective(function: str, name: str) -> Callable[[Setting, Any], Any]:
    return lambda s, v: getattr(fs, function)(torch.ones(s.mesh.world_size), s.mesh, **{name: v})


def per_sample(name: str) -> Callable[[Setting, Any], Any]:
    more = {"max_norm": 1.0, "generator": torch.Generator()} if name == "noise_multiplier" else {}
    return lambda s, v: fs.per_sample_grad(loss, s.plan, s.mesh, **more, **{name: v})


def saved(name: str) -> Callable[[Setting, Any], Any]:
    return lambda s, v: fs.save(s.folder / "step", {"step": 1}, s.plan, s.mesh, **{name: v}).wait()


APPLY, LINEAR, BUFFERS = fs.make_functional(torch.nn.Linear(2, 2))
PROFILE = fs.profile(APPLY, LINEAR, BUFFERS, torch.ones(3, 2))
TRACED = Traced(None, fs.Mesh())  # without recordings


def estimated(name: str) -> Callable[[Setting, Any], Any]:
    return lambda s, v: fs.estimate(PROFILE, fs.make_plan(LINEAR, s.mesh.world_size), **{name: v})


# name of the function, then of the option
CASES: dict[tuple[str, str], Case] = {
    ("make_functional", "mutable"): Case(lambda s, v: fs.make_functional(torch.nn.Linear(2, 2), v), FLAG),
    ("Functional.train", "mode"): Case(lambda s, v: APPLY.train(v), FLAG),
    ("make_plan", "mesh"): Case(lambda s, v: fs.make_plan(PARAMS, v), RANKS),
    ("make_plan", "strategy"): Case(
        lambda s, v: fs.make_plan(PARAMS, 2, strategy=v), choice("full_shard", "shard_grad_op", "no_shard")
    ),
    ("make_plan", "offload"): Case(lambda s, v: fs.make_plan(PARAMS, 2, offload=v), FLAG),
    ("make_plan", "bucket_bytes"): Case(lambda s, v: fs.make_plan(PARAMS, 2, bucket_bytes=v), BUCKET),
    ("make_plan", "reshard_after_forward"): Case(
        lambda s, v: fs.make_plan(PARAMS, 2, reshard_after_forward=v), FREED, none=True
    ),
    ("make_plan", "reshard_after_backward"): Case(
        lambda s, v: fs.make_plan(PARAMS, 2, strategy="shard_grad_op", reshard_after_backward=v), FLAG
    ),
    **{
        ("MixedPrecision", name): Case(lambda s, v, name=name: fs.MixedPrecision(**{name: v}), FLAG)
        for name in (
            "keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs", "full_precision_in_eval",
            "divide_before_reduce",
        )
    },
    ("make_schedule", "forward_prefetch"): Case(lambda s, v: fs.make_schedule(s.plan, forward_prefetch=v), FLAG),
    ("make_schedule", "backward_prefetch"): Case(
        lambda s, v: fs.make_schedule(s.plan, backward_prefetch=v), choice("pre", "post", None), none=True
    ),
    ("make_schedule", "limit"): Case(lambda s, v: fs.make_schedule(s.plan, limit=v), count(1, "units")),
    ("Schedule", "forward_prefetch"): Case(lambda s, v: fs.Schedule(("a",), v, "pre", 1), FLAG),
    ("Schedule", "backward_prefetch"): Case(
        lambda s, v: fs.Schedule(("a",), True, v, 1), choice("pre", "post", None), none=True
    ),
    ("Schedule", "limit"): Case(lambda s, v: fs.Schedule(("a",), True, "pre", v), count(1, "units")),
    ("predict_events", "micro_batches"): Case(
        lambda s, v: fs.predict_events(s.plan, micro_batches=v), count(1, "micro-batches")
    ),
    ("predict_events", "forwards"): Case(lambda s, v: fs.predict_events(s.plan, forwards=v), count(1, "forwards")),
    ("predict_events", "reduce"): Case(lambda s, v: fs.predict_events(s.plan, reduce=v), REDUCE),
    ("wrap.by_size", "min_numel"): Case(lambda s, v: fs.wrap.by_size(v), count(0, "elements")),
    ("init_mesh", "shape"): Case(lambda s, v: fs.init_mesh(v), SHAPE, none=True),
    ("init_mesh", "timeout"): Case(lambda s, v: fs.init_mesh(timeout=v), positive()),
    ("init_mesh", "patience"): Case(lambda s, v: fs.init_mesh(patience=v), positive()),
    ("init_mesh", "give_up"): Case(lambda s, v: fs.init_mesh(give_up=v), positive()),
    ("init_mesh", "shared_memory"): Case(lambda s, v: fs.init_mesh(shared_memory=v), FLAG),
    ("Mesh.reshaped", "shape"): Case(lambda s, v: s.mesh.reshaped(v), SHAPE),
    ("Mesh.from_device_mesh", "patience"): Case(lambda s, v: of_device_mesh(s, patience=v), positive()),
    ("Mesh.from_device_mesh", "give_up"): Case(lambda s, v: of_device_mesh(s, give_up=v), positive()),
    ("Mesh.from_device_mesh", "shared_memory"): Case(lambda s, v: of_device_mesh(s, shared_memory=v), FLAG),
    ("delayed", "seconds"): Case(lambda s, v: delayed(s.mesh, "all_gather", v), FROM_ZERO),
    ("simulate", "world_size"): Case(lambda s, v: fs.simulate(lambda mesh: None, v), RANKS),
    ("simulate", "threads"): Case(lambda s, v: fs.simulate(lambda mesh: None, 1, threads=v), count(1, "threads"), none=True),
    **{("to_state_dict", name): Case(of_state_dict(name), FLAG) for name in ("rank0_only", "offload", "sharded")},
    **{
        ("optimizer_to_state_dict", name): Case(of_optimizer_dict(name), FLAG)
        for name in ("rank0_only", "offload", "sharded", "flatten")
    },
    ("shard", "check"): Case(lambda s, v: fs.shard(PARAMS, s.plan, s.mesh, check=v), FLAG),
    ("from_state_dict", "check"): Case(lambda s, v: fs.from_state_dict(PARAMS, s.plan, s.mesh, check=v), FLAG),
    ("from_pretrained", "mutable"): Case(
        lambda s, v: fs.from_pretrained(exported(s), s.mesh, model=Net(), plan=s.plan, mutable=v), FLAG
    ),
    ("save_pretrained", "max_shard_size"): Case(
        lambda s, v: fs.save_pretrained(s.folder / "x", *hugging_face(), s.mesh, max_shard_size=v), SIZE
    ),
    ("from_state_dict", "cast"): Case(lambda s, v: fs.from_state_dict(PARAMS, s.plan, s.mesh, cast=v), FLAG),
    ("import_dcp", "cast"): Case(lambda s, v: fs.import_dcp(saved_by_dcp(s), s.plan, s.mesh, cast=v), FLAG),
    ("import_safetensors", "cast"): Case(lambda s, v: fs.import_safetensors(exported(s), s.plan, s.mesh, cast=v), FLAG),
    **{
        ("optimizer_from_state_dict", name): Case(
            lambda s, v, name=name: fs.optimizer_from_state_dict(
                {"state": {}, "param_groups": []}, SGD, s.plan, s.mesh, **{name: v}
            ),
            FLAG,
        )
        for name in ("check", "strict")
    },
    ("optimizer_from_state_dict", "steps"): Case(
        lambda s, v: fs.optimizer_from_state_dict({"state": {}, "param_groups": []}, SGD, s.plan, s.mesh, steps=v),
        count(0, "steps"), none=True,
    ),
    ("value_and_grad", "has_aux"): Case(lambda s, v: fs.value_and_grad(loss, v), FLAG),
    ("value_and_grad", "weighted"): Case(lambda s, v: fs.value_and_grad(loss, weighted=v), FLAG),
    ("value_and_grad", "allow_constant"): Case(lambda s, v: fs.value_and_grad(loss, allow_constant=v), FLAG),
    ("accumulate", "allow_constant"): Case(lambda s, v: fs.accumulate(loss, 2, allow_constant=v), FLAG),
    ("accumulate", "micro_batches"): Case(lambda s, v: fs.accumulate(loss, v), count(1, "micro-batches")),
    ("accumulate", "has_aux"): Case(lambda s, v: fs.accumulate(loss, 2, v), FLAG),
    ("accumulate", "reduce"): Case(lambda s, v: fs.accumulate(loss, 2, reduce=v), REDUCE),
    ("value_and_grad", "divisor"): Case(lambda s, v: fs.value_and_grad(loss, divisor=v), positive(), none=True),
    ("accumulate", "divisor"): Case(lambda s, v: fs.accumulate(loss, 2, divisor=v), positive(), none=True),
    ("make_train_step", "divisor"): Case(train("divisor"), positive(), none=True),
    ("accumulate", "weighted"): Case(lambda s, v: fs.accumulate(loss, 2, weighted=v), FLAG),
    **{(name, "tiled"): Case(collective(name, "tiled"), FLAG) for name in ("all_gather", "psum_scatter", "all_to_all")},
    ("all_gather", "dim"): Case(collective("all_gather", "dim"), DIM._replace(bad_values=(2, -3))),
    ("psum_scatter", "dim"): Case(collective("psum_scatter", "dim"), DIM),
    ("all_to_all", "split_dim"): Case(collective("all_to_all", "split_dim"), DIM),
    ("all_to_all", "concat_dim"): Case(collective("all_to_all", "concat_dim"), DIM),
    ("ppermute", "perm"): Case(lambda s, v: fs.ppermute(torch.ones(1), s.mesh, v), PERM),
    ("per_sample_grad", "max_norm"): Case(per_sample("max_norm"), positive(), none=True),
    ("per_sample_grad", "noise_multiplier"): Case(per_sample("noise_multiplier"), FROM_ZERO),
    ("per_sample_grad", "batch_size"): Case(per_sample("batch_size"), positive(), none=True),
    ("per_sample_grad", "chunk_size"): Case(per_sample("chunk_size"), count(1, "samples"), none=True),
    ("global_norm", "norm_type"): Case(lambda s, v: fs.global_norm(*grads(s), v), positive(infinite=True)),
    ("clip_by_global_norm", "max_norm"): Case(lambda s, v: fs.clip_by_global_norm(*grads(s), v), positive()),
    ("clip_by_global_norm", "norm_type"): Case(
        lambda s, v: fs.clip_by_global_norm(*grads(s), 1.0, v), positive(infinite=True)
    ),
    ("clip_by_global_norm", "donate"): Case(
        lambda s, v: fs.clip_by_global_norm(*fs.copy(grads(s)), 1.0, donate=v), FLAG
    ),
    ("GradScaler.unscale", "donate"): Case(
        lambda s, v: fs.GradScaler().unscale({"w": torch.ones(2)}, fs.GradScaler().init(s.mesh), s.mesh, donate=v), FLAG
    ),
    ("torch_optimizer", "elementwise"): Case(
        lambda s, v: fs.torch_optimizer(torch.optim.SGD, elementwise=v),
        FLAG._replace(good=(True,)), none=True,
    ),
    ("torch_schedule", "lr"): Case(
        lambda s, v: fs.torch_schedule(torch.optim.lr_scheduler.StepLR, lr=v, step_size=1), FROM_ZERO
    ),
    ("make_meter", "tokens"): Case(lambda s, v: fs.make_meter(s.mesh, tokens=v), count(1, "tokens"), none=True),
    ("make_meter", "step"): Case(lambda s, v: fs.make_meter(s.mesh, step=v), count(0, "steps")),
    ("torch_optimizer", "lr"): Case(lambda s, v: fs.torch_optimizer(torch.optim.SGD, lr=v), RATE),
    ("muon", "lr"): Case(lambda s, v: fs.muon(s.plan, s.mesh, lr=v), RATE),
    **{("make_train_step", name): Case(train(name), FLAG) for name in ("has_aux", "mutable", "weighted", "donate")},
    ("make_train_step", "max_norm"): Case(train("max_norm"), positive(infinite=True), none=True),
    ("make_train_step", "accumulate"): Case(train("accumulate"), count(1, "micro-batches")),
    ("make_train_step", "reduce"): Case(train("reduce"), REDUCE),
    ("GradScaler", "init_scale"): Case(lambda s, v: fs.GradScaler(init_scale=v).init(s.mesh), SCALE),
    ("GradScaler", "growth_factor"): Case(lambda s, v: fs.GradScaler(growth_factor=v), FACTOR),
    ("GradScaler", "backoff_factor"): Case(lambda s, v: fs.GradScaler(backoff_factor=v), PART),
    ("GradScaler", "growth_interval"): Case(lambda s, v: fs.GradScaler(growth_interval=v), count(1, "steps")),
    ("save", "wait"): Case(saved("wait"), FLAG),
    ("save", "keep"): Case(saved("keep"), count(1, "checkpoints"), none=True),
    ("save", "timeout"): Case(saved("timeout"), positive()),
    ("profile", "fold"): Case(lambda s, v: fs.profile(APPLY, LINEAR, BUFFERS, torch.ones(3, 2), fold=v), FLAG),
    **{("estimate", name): Case(estimated(name), FLAG) for name in ("donate", "clip", "count_embeddings", "first_step")},
    ("fully_shard", "remat"): Case(
        lambda s, v: fs.fully_shard(APPLY, fs.make_plan(LINEAR, s.mesh), s.mesh, remat=v),
        REMAT._replace(bad_types=(1, 0, None, np.bool_(True))),  # one name may stand alone
    ),
    ("estimate", "remat"): Case(estimated("remat"), REMAT),
    ("estimate", "micro_batches"): Case(estimated("micro_batches"), count(1, "micro-batches")),
    ("estimate", "budget"): Case(estimated("budget"), SIZE._replace(good=(1, "80GiB", "5GB", np.int64(9))), none=True),
    ("auto_plan", "ranks"): Case(lambda s, v: fs.auto_plan(PROFILE, ranks=v), count(1, "ranks")),
    ("auto_plan", "budget"): Case(
        lambda s, v: fs.auto_plan(PROFILE, ranks=2, budget=v), SIZE._replace(good=(1, "80GiB", np.int64(9))), none=True
    ),
    ("passes.keep_gathered", "budget"): Case(lambda s, v: fs.passes.keep_gathered(TRACED, budget=v), SIZE),
    ("passes.gather_earlier", "budget"): Case(lambda s, v: fs.passes.gather_earlier(TRACED, budget=v), SIZE, none=True),
    ("passes.gather_earlier", "by"): Case(lambda s, v: fs.passes.gather_earlier(TRACED, by=v), count(1, "units"), none=True),
    ("passes.wait_later", "budget"): Case(lambda s, v: fs.passes.wait_later(TRACED, budget=v), SIZE, none=True),
    ("passes.bucket", "bucket_bytes"): Case(lambda s, v: fs.passes.bucket(TRACED, bucket_bytes=v), SIZE),
    ("restore", "cast"): Case(lambda s, v: fs.restore(saved_by_dcp(s), s.plan, s.mesh, cast=v), FLAG),
    ("latest", "thorough"): Case(lambda s, v: fs.latest(s.folder, thorough=v), FLAG),
    ("export_safetensors", "max_shard_size"): Case(
        lambda s, v: fs.export_safetensors(s.folder / "x", *grads(s), max_shard_size=v), SIZE
    ),
}  # fmt: skip


def of_device_mesh(s: Setting, **options: Any) -> None:
    """Call ``from_device_mesh`` with a mesh that it refuses once it has checked the options."""
    try:
        fs.Mesh.from_device_mesh(None, **options)  # type: ignore[arg-type]
    except TypeError as error:
        if "device_mesh must be a torch.distributed DeviceMesh" not in str(error):
            raise


@pytest.mark.parametrize(("function", "option"), CASES, ids=lambda value: value)
def test_an_option_is_refused_before_anything_is_communicated(function: str, option: str, tmp_path: Any) -> None:
    case, setting = CASES[function, option], Setting.of(2, tmp_path)
    name = "axes" if option == "shape" else option
    for kind, values in ((ValueError, case.rule.bad_values), (TypeError, case.rule.bad_types)):
        for value in values:
            if value is None and case.none:
                continue
            with pytest.raises(kind, match=rf"{case.rule.words}.*; found .*: \S") as raised:
                case.call(setting, value)
            assert name in str(raised.value) or case.rule is SHAPE
            assert repr(value) in str(raised.value) or case.rule is SHAPE


@pytest.mark.parametrize(("function", "option"), CASES, ids=lambda value: value)
def test_a_value_that_keeps_the_rule_is_taken(function: str, option: str, tmp_path: Any) -> None:
    case, setting = CASES[function, option], Setting.of(1, tmp_path)
    for value in (*case.rule.good, *([None] if case.none else [])):
        case.call(setting, value)


# Records: the library makes them, and no option is read from them.
RECORDS = {"Contents", "Event", "Owners", "Piece", "Plan", "PerRank", "Saving", "ScalerState", "TrainState", "TrainStep"}
# Why not in the table: each rank checks these against the other ranks first, so that all of them raise.
NO_OPTIONS = {
    ("broadcast_object", "src"),
    ("shard", "src"),
    ("from_state_dict", "src"),
    ("optimizer_from_state_dict", "src"),
}


def public_functions() -> dict[str, Any]:
    """Return every public function and method, and every class with fields, by name."""
    found: dict[str, Any] = {"delayed": delayed, "Functional": Functional, "TrainStep": TrainStep}
    found |= {name: getattr(fs, name) for name in fs.__all__ if name not in ("passes", "wrap")}
    found |= {f"passes.{name}": getattr(fs.passes, name) for name in fs.passes.__all__}
    found |= {f"wrap.{name}": getattr(fs.wrap, name) for name in fs.wrap.__all__ if name not in ("Policy", "Units")}
    for name, value in list(found.items()):
        if isinstance(value, type):
            methods = inspect.getmembers(value, lambda member: inspect.isfunction(member) or inspect.ismethod(member))
            found |= {f"{name}.{method}": function for method, function in methods if not method.startswith("_")}
    return found


def numeric_options() -> set[tuple[str, str]]:
    """Return every option of a public name that is annotated as a number or a truth value."""
    return {
        (name, option)
        for name, function in public_functions().items()
        if name.partition(".")[0] not in RECORDS and name != "Functional"
        for option, parameter in inspect.signature(function).parameters.items()
        if re.search(r"\b(int|float|bool|Literal)\b", str(parameter.annotation).replace("Callable[[nn.Module], bool", ""))
        if (name, option) not in NO_OPTIONS
    }


def test_every_number_and_flag_of_a_public_name_is_in_the_table() -> None:
    missing = sorted(numeric_options() - CASES.keys())
    assert not missing, f"no case for {missing}"
    for function, option in CASES:  # and every case is of an option that exists
        parameters = inspect.signature(public_functions()[function]).parameters
        assert option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()), (function, option)


def test_the_table_would_miss_an_option_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_new_option(params: Any, rate: "float | None" = None) -> None: ...

    monkeypatch.setattr(fs, "gather", with_a_new_option)
    assert ("gather", "rate") in numeric_options() - CASES.keys()
