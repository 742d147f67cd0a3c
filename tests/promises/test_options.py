"""Every option that is a number, a count or a flag is right, or an error that names it.

The error comes before anything is communicated: the mesh of these cases cannot communicate. It
names the option, the rule, the value found, and a remedy.
"""

import inspect
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import funcshard as fs
from funcshard.module.functional import Functional
from funcshard.testing import delayed
from funcshard.train.train_step import TrainStep
from tests.core.units import forward_mode
from tests.right_calls import RIGHT_CALLS, World


class Silent:
    """A group of two ranks that cannot communicate."""

    rank, size, global_rank = 0, 2, 0

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"{name} was called before the option was checked")

        return refuse


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


PREFETCH = choice("pre", "post", None)
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
SHAPE = Rule("axes must be whole numbers of ranks", tuple({"shard": n} for n in (0, 1.0, True, -1)), (), ({"shard": 1},))
SIZE = Rule(
    "must be (a whole number|a number) of bytes", (0, -1, 1.5, math.nan, math.inf, "5", "1.5GB", "-1GB", "0MB"),
    (True, None, [1]), (1, "5GB", "1 KB", np.int64(9)),
)  # fmt: skip
BUDGET = SIZE._replace(good=(1, "80GiB", np.int64(9)))
DIM = Rule("must be the number of a dimension", (1, -2, 7), (None, True, "0", [0], 0.0, math.nan), (0, -1, np.int64(0)))
PERM = Rule("must be pairs", (None, 1, [0], [(0,)], [(0, 7)], [(0, 0), (0, 1)], [(0.0, 1)]), (), ([], [(0, 0)], {(0, 0)}))


def or_none(rule: Rule) -> Rule:
    """Return ``rule`` for an option that ``None`` is a value of too."""
    return rule._replace(good=(*rule.good, None), bad_types=tuple(value for value in rule.bad_types if value is not None))


# Of each function in RIGHT_CALLS, the rules of its options; what is annotated as a truth value is a flag.
RULES: dict[str, dict[str, Rule]] = {
    "make_plan": {
        "mesh": RANKS, "strategy": choice("full_shard", "shard_grad_op", "no_shard"),
        "bucket_bytes": BUCKET, "reshard_after_forward": or_none(FREED),
    },
    **{name: {"block": count(1, "elements")} for name in ("Storage", "int8", "fp8")},
    "nf4": {"block": count(2, "elements")},
    "make_schedule": {"backward_prefetch": PREFETCH, "limit": count(1, "units")},
    "Schedule": {"backward_prefetch": PREFETCH, "limit": count(1, "units")},
    "Accumulation": {
        "micro_batches": count(1, "micro-batches"), "forwards": count(1, "forwards"), "reduce": REDUCE,
    },
    "predict_events": {
        "accumulate": count(1, "micro-batches"),
        "transform": choice("grad", "vjp", "jvp", "hvp", "gnvp", "linearize", None),
    },
    "wrap.by_size": {"min_numel": count(0, "elements")},
    "init_mesh": {"shape": or_none(SHAPE), "timeout": positive(), "patience": positive(), "give_up": positive()},
    "Mesh.reshaped": {"shape": SHAPE},
    "Mesh.from_device_mesh": {"patience": positive(), "give_up": positive()},
    "delayed": {"seconds": FROM_ZERO},
    "simulate": {"world_size": RANKS, "threads": or_none(count(1, "threads"))},
    "save_pretrained": {"max_shard_size": SIZE},
    "optimizer_from_state_dict": {"steps": or_none(count(0, "steps"))},
    "value_and_grad": {"divisor": or_none(positive())},
    "jacobian": {"chunk_size": or_none(count(1, "rows"))},
    "accumulate": {
        "micro_batches": count(1, "micro-batches"), "reduce": REDUCE, "divisor": or_none(positive()), "weighted": FLAG,
    },
    "all_gather": {"dim": DIM._replace(bad_values=(2, -3))},
    "psum_scatter": {"dim": DIM},
    "all_to_all": {"split_dim": DIM, "concat_dim": DIM},
    "ppermute": {"perm": PERM},
    "per_sample_grad": {
        "max_norm": or_none(positive()), "noise_multiplier": FROM_ZERO, "batch_size": or_none(positive()),
        "chunk_size": or_none(count(1, "samples")),
    },
    "per_sample_norms": {"chunk_size": or_none(count(1, "samples"))},
    "global_norm": {"norm_type": positive(infinite=True)},
    "clip_by_global_norm": {"max_norm": positive(), "norm_type": positive(infinite=True)},
    "torch_optimizer": {"lr": RATE, "elementwise": or_none(FLAG._replace(good=(True,)))},
    "torch_schedule": {"lr": FROM_ZERO},
    "make_meter": {"tokens": or_none(count(1, "tokens")), "step": count(0, "steps")},
    "muon": {"lr": RATE},
    "make_train_step": {
        "has_aux": FLAG, "weighted": FLAG, "divisor": or_none(positive()),
        "max_norm": or_none(positive(infinite=True)), "accumulate": count(1, "micro-batches"), "reduce": REDUCE,
    },
    "GradScaler": {
        "init_scale": SCALE, "growth_factor": FACTOR, "backoff_factor": PART, "growth_interval": count(1, "steps"),
    },
    "save": {"keep": or_none(count(1, "checkpoints"))},
    "export_safetensors": {"max_shard_size": SIZE},
    "fully_shard": {"remat": REMAT._replace(bad_types=(1, 0, None, np.bool_(True)))},  # one name may stand alone
    "linalg.cg": {"rtol": FROM_ZERO, "atol": FROM_ZERO, "maxiter": count(1, "steps")},
    "linalg.power_iteration": {"tol": FROM_ZERO, "maxiter": count(1, "products")},
    "linalg.eigsh": {
        "k": count(1, "eigenvalues"), "which": choice("LM", "LA", "SA"), "ncv": or_none(count(3, "vectors", most=9)),
        "maxiter": count(1, "restarts"), "tol": FROM_ZERO,
    },
    "linalg.lanczos_quadrature": {"ncv": count(1, "products"), "num_repeats": count(1, "repeats")},
    "linalg.hutchinson_trace": {"num_matvecs": count(1, "vectors"), "distribution": choice("rademacher", "normal")},
    "linalg.hutchinson_diag": {"num_matvecs": count(1, "vectors"), "distribution": choice("rademacher", "normal")},
    "estimate": {
        "remat": REMAT,
        "accumulate": count(1, "micro-batches"), "budget": or_none(BUDGET),
        "transform": choice("grad", "jvp", "vjp", "hvp", "gnvp", "linearize", None),
    },
    "auto_plan": {"ranks": count(1, "ranks"), "budget": or_none(BUDGET)},
    "plan_run": {
        "gpus": count(1, "GPUs"), "seq": or_none(count(1, "tokens")), "batch": or_none(count(1, "samples")),
        "budget": or_none(BUDGET)._replace(good=(1, "60GiB", np.int64(9), None)),
    },
    "passes.keep_gathered": {"budget": SIZE},
    "passes.gather_earlier": {"budget": or_none(SIZE), "by": or_none(count(1, "units"))},
    "passes.wait_later": {"budget": or_none(SIZE)},
}  # fmt: skip
# What a value needs beside it.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("make_plan", "reshard_after_forward"): {"mesh": 2},
}
# Records: the library makes them, and no option is read from them.
RECORDS = {
    "Contents", "Event", "Owners", "Piece", "Plan", "PerRank", "GenerationPlan", "RunPlan", "Saving", "ScalerState",
    "TrainState", "TrainStep",
}  # fmt: skip
# Why not in the table: a function, and what each rank checks against the other ranks first, so that all of them raise.
NO_OPTIONS = {
    ("plan_run", "inputs"),
    ("broadcast_object", "src"),
    ("shard", "src"),
    ("from_state_dict", "src"),
    ("optimizer_from_state_dict", "src"),
}


def public_functions() -> dict[str, Any]:
    """Return every public function and method, and every class with fields, by name."""
    found: dict[str, Any] = {"delayed": delayed, "Functional": Functional, "TrainStep": TrainStep}
    found |= {name: getattr(fs, name) for name in fs.__all__ if name not in ("linalg", "passes", "testing", "wrap")}
    found |= {f"linalg.{name}": getattr(fs.linalg, name) for name in fs.linalg.__all__}
    found |= {f"passes.{name}": getattr(fs.passes, name) for name in fs.passes.__all__}
    found |= {f"wrap.{name}": getattr(fs.wrap, name) for name in fs.wrap.__all__ if name not in ("Policy", "Units")}
    for name, value in list(found.items()):
        if isinstance(value, type):
            methods = inspect.getmembers(value, lambda member: inspect.isfunction(member) or inspect.ismethod(member))
            found |= {f"{name}.{method}": function for method, function in methods if not method.startswith("_")}
    return found


def numeric_options() -> dict[tuple[str, str], str]:
    """Return every option of a public name that is annotated as a number or a truth value, with its annotation."""
    return {
        (name, option): str(parameter.annotation)
        for name, function in public_functions().items()
        if name.partition(".")[0] not in RECORDS and name != "Functional"
        for option, parameter in inspect.signature(function).parameters.items()
        if re.search(r"\b(int|float|bool|Literal)\b", str(parameter.annotation).replace("Callable[[nn.Module], bool", ""))
        if (name, option) not in NO_OPTIONS
    }


CASES = {(function, option): rule for function, rules in RULES.items() for option, rule in rules.items()}
CASES = dict.fromkeys((case for case, annotation in numeric_options().items() if annotation == "bool"), FLAG) | CASES


def call(world: World, function: str, option: str, value: Any) -> None:
    called, arguments, options = RIGHT_CALLS[function](world)
    values = BESIDE.get((function, option), {}) | {option: value}
    names = list(inspect.signature(called).parameters)[: len(arguments)]
    positional = [values.pop(name, argument) for name, argument in zip(names, arguments, strict=True)]
    called(*positional, **options | values)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "option"), CASES)
def test_an_option_is_refused_before_anything_is_communicated(function: str, option: str, tmp_path: Path) -> None:
    rule, world = CASES[function, option], World(fs.Mesh({"shard": Silent()}), tmp_path)  # type: ignore[arg-type]
    name = "axes" if option == "shape" else option
    for kind, values in ((ValueError, rule.bad_values), (TypeError, rule.bad_types)):
        for value in values:
            with pytest.raises(kind, match=rf"{rule.words}.*; found .*: \S") as raised:
                call(world, function, option, value)
            assert (name in str(raised.value) and repr(value) in str(raised.value)) or rule.words == SHAPE.words


@pytest.mark.nightly(one_in=4)
@forward_mode
@pytest.mark.parametrize(("function", "option"), CASES)
def test_a_value_that_keeps_the_rule_is_taken(function: str, option: str, tmp_path: Path) -> None:
    for value in CASES[function, option].good:
        call(World(fs.Mesh(), tmp_path), function, option, value)


def test_every_number_and_flag_of_a_public_name_is_in_the_table() -> None:
    missing = sorted(numeric_options().keys() - CASES.keys())
    assert not missing, f"no case for {missing}"
    for function, option in CASES:  # and every case is of an option that exists
        parameters = inspect.signature(public_functions()[function]).parameters
        assert option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()), (function, option)
