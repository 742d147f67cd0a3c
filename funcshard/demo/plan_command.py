"""``python -m funcshard plan``: the plan of a model, and the estimate of its step."""

from __future__ import annotations

import argparse
import base64
import functools
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs
from funcshard._utils.options import did_you_mean, outline
from funcshard._utils.regular_files import read_regular
from funcshard.demo.arguments import (
    add_mesh,
    at_least,
    check_mesh,
    gpt_config,
    import_callable,
)
from funcshard.demo.decoder_configs import DECODERS
from funcshard.demo.decoders import decoder
from funcshard.demo.gpt import GPT
from funcshard.estimate import (
    OPTIMIZERS,
    Infeasible,
    Profile,
    Report,
    draw_holdings,
    draw_memory,
    draw_timeline,
    load_hardware,
)
from funcshard.plan import STRATEGIES

PRECISIONS = {
    "fp32": None,
    "bf16": fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
# Options that a search chooses, with their defaults.
_CHOSEN = {"replicate": 1, "strategy": STRATEGIES[0], "bucket_bytes": "auto", "remat": False}
_LONGEST = 8192  # tokens of a sample by default, if the model takes so many
_MOST_RANKS = 1_000_000
_OTHERS = 1024  # tokens of a sample by default for a model that has no context

_Loss = Callable[..., torch.Tensor]


def _bucket_bytes(text: str) -> int | str:
    return text if text == "auto" else at_least(0, 2**63)(text)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "path", nargs="?", metavar="PATH",
        help="a config.json of Hugging Face or a folder with one, a FILE.py:FUNCTION, or a name as for --model: finds the "
        "best plan and batch, and prints one screen; exit code 1 if none fits (default: the plan that the options describe)",
    )  # fmt: skip
    add_mesh(
        parser,
        ranks="ranks to plan for",
        units="blocks.*; for another --model, the modules in its outermost lists",
        alias="--gpus",
    )
    parser.add_argument(
        "--model", metavar="NAME",
        help=f"name of a published decoder, one of {', '.join(DECODERS)}; or MODULE:CALLABLE, a function without arguments "
        "that returns an nn.Module (default: the GPT of train)",
    )  # fmt: skip
    parser.add_argument(
        "--bucket-bytes", type=_bucket_bytes, default="auto", metavar="BYTES",
        help="largest size of a group of small units that follow one another, in gathered bytes; 0 for none; by default, "
        "many tiny units form groups",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=[*PRECISIONS, "bf16-params"],
        help="dtype in which units compute; bf16 reduces gradients in float32; bf16-params, for a PATH, keeps parameters in "
        "bfloat16 too (default: fp32, and bf16 for a PATH)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true",
        help="print the plan alone, as JSON for Plan.from_json; for a PATH, the figures and the plan",
    )  # fmt: skip
    parser.add_argument(
        "--html", metavar="FILE",
        help="write the tables to a web page, with pictures if matplotlib is installed (default: none)",
    )  # fmt: skip
    group = parser.add_argument_group("estimate")
    group.add_argument(
        "--hardware", "--gpu", metavar="NAME",
        help="estimate memory, time and traffic of a step on this hardware: a name such as h100, or a file that calibrate "
        "wrote (default: no estimate, and h100 for a PATH)",
    )  # fmt: skip
    group.add_argument(
        "--budget", metavar="SIZE",
        help="memory of a rank, such as 60GiB; a higher peak gives exit code 1, and so does reserved memory for a PATH "
        "(default: the memory of the hardware)",
    )  # fmt: skip
    group.add_argument(
        "--margin", metavar="SIZE",
        help="for a PATH, memory that torch's allocator doesn't get (default: 3GiB on GPUs)",
    )  # fmt: skip
    group.add_argument(
        "--batch", type=at_least(1), metavar="N",
        help="samples of a rank in one step (default: 1; for a PATH, the fastest that fit)",
    )  # fmt: skip
    group.add_argument(
        "--seq", type=at_least(1), metavar="N",
        help=f"tokens of a sample (default: the context of the model, at most {_LONGEST}; {_OTHERS} for a MODULE:CALLABLE)",
    )  # fmt: skip
    group.add_argument(
        "--inputs", metavar="MODULE:CALLABLE",
        help="function of batch and seq that returns the inputs of the model as a tuple or dictionary (default: tokens of "
        "shape [batch, seq], with cross entropy as the loss)",
    )  # fmt: skip
    group.add_argument(
        "--optimizer",
        choices=[*OPTIMIZERS],
        default="adamw",
        help="optimizer that updates the shards (default: %(default)s)",
    )
    group.add_argument(
        "--remat", action="store_true", help="compute all units but the root again in backward"
    )
    group.add_argument(
        "--auto", action="store_true",
        help="find the fastest plan that fits the budget: mesh, strategies, and units that backward computes again; exit "
        "code 1 if none fits",
    )  # fmt: skip
    group.add_argument(
        "--compare", metavar="FILE",
        help="estimate also the plan in this file, which --json wrote, and compare the two (default: none)",
    )  # fmt: skip


def plan_command(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    check_mesh(options.ranks, options.replicate)
    _check_together(options)
    _check_files(options)
    if options.path is not None:
        return _whole_run(options)
    shown_items = _shown(options, _model(options.model, options))
    if options.html:
        _write_page(Path(options.html), shown_items)
    shown_plans = [plan for plan in shown_items if isinstance(plan, fs.Plan)]
    # The plan alone, so that the output is a file for Plan.from_json.
    print(
        shown_plans[0].to_json()
        if options.json and shown_plans
        else "\n\n".join(map(str, shown_items))
    )
    shown_reports = [report for report in shown_items if isinstance(report, Report | Infeasible)]
    return int(bool(options.budget or options.auto) and not all(r.fits for r in shown_reports))


def _whole_run(options: argparse.Namespace) -> int:
    """Plan a run of a model of any origin, and return the exit code."""
    is_ours = options.path in DECODERS or ":" in options.path
    run = fs.plan_run(
        _model(options.path, options) if is_ours else options.path,
        gpus=options.ranks,
        gpu=options.hardware or "h100",
        seq=options.seq,
        batch=options.batch,
        budget=options.budget,
        margin=options.margin,
        precision=options.precision or "bf16",
        optimizer=options.optimizer,
        units=options.units,
        inputs=import_callable("--inputs", options.inputs) if options.inputs else None,
    )
    if options.html:
        _write_page(Path(options.html), [run])
    print(run.to_json() if options.json else run)
    return int(not run.fits)


def _check_together(options: argparse.Namespace) -> None:
    if options.path is None:
        _check_no_path(options)
    else:
        _check_path(options)


def _check_path(options: argparse.Namespace) -> None:
    """Raise for options of a plan beside PATH, which finds it."""
    defaults = {**_CHOSEN, "auto": False, "model": None, "compare": None}
    for name, default in defaults.items():
        if getattr(options, name) != default:
            raise ValueError(
                f"PATH finds the plan itself; found --{name.replace('_', '-')}: leave it out, or "
                "pass --model in place of PATH"
            )


def _check_no_path(options: argparse.Namespace) -> None:
    if options.precision == "bf16-params" or options.margin:
        raise ValueError("--precision bf16-params and --margin belong to a PATH: pass one")
    for name in ("budget", "compare", "auto"):
        if getattr(options, name) and not options.hardware:
            raise ValueError(
                f"--{name} belongs to an estimate: add --hardware, such as --hardware h100"
            )
    for name, default in _CHOSEN.items():
        if options.auto and getattr(options, name) != default:
            raise ValueError(
                f"--auto chooses mesh, strategies and remat: leave out --{name.replace('_', '-')}"
            )


def _check_files(options: argparse.Namespace) -> None:
    """Raise for ranks or files that would fail after the work is done."""
    if options.ranks > _MOST_RANKS:
        raise ValueError(
            f"--ranks must be at most {_MOST_RANKS:,}; found {options.ranks:,}: no machine has "
            "more, pass the ranks of yours"
        )
    # Read for the error only: the estimate takes a while.
    if options.compare:
        _read(options.compare)
    if not options.html:
        return
    page_path = Path(options.html)
    if page_path.is_dir():
        raise ValueError(
            f"--html must be a file; found the folder {page_path}: add a name, such as "
            f"{page_path / 'plan.html'}"
        )
    if not page_path.parent.is_dir():
        raise ValueError(
            f"--html must be a file in a folder that exists; found {page_path}: make the folder "
            f"{page_path.parent} first"
        )


def _shown(options: argparse.Namespace, model: nn.Module) -> list[Any]:
    apply, params, buffers = fs.make_functional(model)
    units = _listed(model) if options.units is None else options.units
    precision = PRECISIONS[options.precision or "fp32"]
    mesh = {"replicate": options.replicate, "shard": options.ranks // options.replicate}
    plan = fs.make_plan(
        params,
        mesh,
        units=units,
        strategy=options.strategy,
        bucket_bytes=options.bucket_bytes,
        precision=precision,
    )
    if not options.hardware:
        return [plan]
    compared_plan = None
    if options.compare:
        compared_plan = _compared(options.compare, plan)
    estimate = _Estimate(options, model, apply, params, buffers)
    if not options.auto:
        report: Any = estimate(plan)
        shown_items: list[Any] = [plan, report]
    else:
        best_plan = fs.auto_plan(
            estimate.profile(precision), ranks=options.ranks, units=units, hardware=estimate.hardware,
            optimizer=options.optimizer, budget=options.budget,
        )  # fmt: skip
        report = best_plan.report
        shown_items = [best_plan]
        if not isinstance(best_plan, Infeasible):
            shown_items += [best_plan.plan, report]
    if compared_plan is not None:
        shown_items.append(fs.compare(estimate(compared_plan), report))
    return shown_items


def _model(spec: str | None, options: argparse.Namespace) -> nn.Module:
    make_model: Callable[[], Any]
    if spec is None:
        make_model = functools.partial(GPT, gpt_config(options))
    elif spec in DECODERS:
        make_model = functools.partial(decoder, spec)
    elif ":" in spec:
        make_model = import_callable("--model", spec)
    else:
        remedy = did_you_mean(
            spec, DECODERS, otherwise="pass one of these, or a function of your own"
        )
        raise ValueError(
            f"--model must be MODULE:CALLABLE, or one of {', '.join(DECODERS)}; found {spec!r}: "
            f"{remedy}"
        )
    # On the meta device a model of any size takes no memory.
    with torch.device("meta"):
        try:
            model = make_model()
        except Exception as error:
            raise ValueError(
                f"--model {spec} failed on the meta device: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"--model {spec} must return a torch.nn.Module; it returned {type(model).__name__}"
        )
    return model


class _Estimate:
    """Estimates plans of one model; plans of equal precision share a trace."""

    def __init__(
        self, options: argparse.Namespace, model: nn.Module, apply: Any, params: Any, buffers: Any
    ) -> None:
        self.options, self.hardware = options, load_hardware(options.hardware)
        model_context = getattr(getattr(model, "config", None), "context", _OTHERS)
        batch_size = options.batch or 1, options.seq or min(model_context, _LONGEST)
        inputs: Any = (torch.empty(batch_size, dtype=torch.int64, device="meta"),)
        keywords = {"loss": _cross_entropy, "targets": inputs[0]}
        if options.inputs:
            keywords = {}  # the model returns its loss
            with torch.device("meta"):
                inputs = import_callable("--inputs", options.inputs)(*batch_size)
            if not isinstance(inputs, tuple):
                raise TypeError(
                    f"--inputs {options.inputs} must return a tuple; it returned "
                    f"{type(inputs).__name__}"
                )
        self.trace = functools.partial(fs.profile, apply, params, buffers, *inputs, **keywords)
        self.profiles: dict[Any, Profile] = {}

    def profile(self, precision: fs.Plan | fs.MixedPrecision | None) -> Profile:
        """Return the trace of the model in a precision, or in that of a plan."""
        profile_key: Any = precision
        if isinstance(precision, fs.Plan):
            # Plans whose units compute in the same dtypes have the same trace.
            profile_key = tuple(unit.precision for unit in precision.unit_list)
        if profile_key not in self.profiles:
            try:
                self.profiles[profile_key] = self.trace(precision=precision)
            except Exception as error:  # any error of the user's own model
                first_line = str(error).partition("\n")[0]
                raise ValueError(
                    f"the model failed on its inputs: {type(error).__name__}: {first_line}"
                ) from error
        return self.profiles[profile_key]

    def __call__(self, plan: fs.Plan) -> Report:
        return fs.estimate(
            self.profile(plan), plan, hardware=self.hardware, optimizer=self.options.optimizer, remat=self.options.remat,
            budget=self.options.budget,
        )  # fmt: skip


def _cross_entropy(logits: Any, targets: torch.Tensor) -> torch.Tensor:
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != targets.shape:
        raise ValueError(
            "the model must return logits [batch, seq, vocabulary] for tokens of shape "
            f"{list(targets.shape)}; found {outline(logits)}: give --inputs, and let the model "
            "return its loss"
        )
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def _listed(model: nn.Module) -> list[str]:
    """Return the layers of a model: the modules in its outermost lists."""
    units: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(
            tuple(f"{unit}." for unit in units)
        ):
            units += [
                f"{name}.{child_name}"
                for child_name, child in module.named_children()
                # Note: a module without parameters is no unit.
                if any(True for _ in child.parameters())
            ]
    return units


def _compared(path: str, plan: fs.Plan) -> fs.Plan:
    """Return the plan in a file, which must be of the same model as ``plan``."""
    read_plan = _read(path)
    shapes_here = {leaf.path: list(leaf.whole_shape) for leaf in plan.leaves}
    shapes_there = {leaf.path: list(leaf.whole_shape) for leaf in read_plan.leaves}
    for name in {**shapes_here, **shapes_there}:
        here, there = (shapes.get(name, "missing") for shapes in (shapes_here, shapes_there))
        if here != there:
            raise ValueError(
                f"--compare must be a plan of the same model; found {path}: {name!r} is {there} "
                f"there and {here} here; pass the options of the model with which that plan was "
                "made"
            )
    return read_plan


def _read(path: str) -> fs.Plan:
    try:
        return fs.Plan.from_json(read_regular(path).decode())
    except OSError as error:
        reason = f"which cannot be read ({error.strerror})"
    except ValueError as error:
        reason = f"which holds no plan ({error})"
    raise ValueError(
        f"--compare must be a file with a plan; found {path}, {reason}: write one with python -m "
        "funcshard plan --json > other.json"
    )


def _write_page(path: Path, shown: list[Any]) -> None:
    html_parts = [item._repr_html_() for item in shown]
    # Without matplotlib the page has the tables alone.
    if importlib.util.find_spec("matplotlib") is not None:
        for plan in [item for item in shown if isinstance(item, fs.Plan)]:
            html_parts.append(_image(draw_holdings(plan)))
        for report in [item for item in shown if isinstance(item, Report)]:
            html_parts += [_image(draw_memory(report)), _image(draw_timeline(report))]
    page_style = "body{font-family:sans-serif;margin:24px;max-width:1200px} img{max-width:100%} body>*{margin-bottom:24px}"
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>funcshard plan</title><style>{page_style}</style>'
    page_body = "".join(f"<div>{part}</div>" for part in html_parts)
    path.write_text(f"{page}{page_body}</html>\n", encoding="utf-8")


def _image(figure: Any) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'
