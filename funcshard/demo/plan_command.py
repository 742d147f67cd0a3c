"""``python -m funcshard plan``: the plan of a model, and the estimate of its step."""

from __future__ import annotations

import argparse
import base64
import functools
import importlib.util
import io
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import funcshard as fs
from funcshard._utils import file_data, table
from funcshard._utils.options import did_you_mean
from funcshard._utils.regular_files import read_regular
from funcshard._utils.table import Table
from funcshard.checkpoint import default_units
from funcshard.demo.arguments import (
    add_mesh,
    at_least,
    check_mesh,
    gpt_config,
    import_callable,
)
from funcshard.demo.decoders import DECODERS, decoder
from funcshard.demo.gpt import GPT
from funcshard.estimate import (
    OPTIMIZERS,
    Hardware,
    Infeasible,
    Report,
    draw_holdings,
    draw_memory,
    draw_timeline,
    load_hardware,
)
from funcshard.plan import STRATEGIES
from funcshard.planning import (
    AXIS,
    LONGEST,
    OTHERS,
    PRECISIONS,
    STORAGES,
    Answer,
    InputMaker,
    answer_file,
    default_seq,
    read_answer,
    trace,
    write_answer,
)

# Options with their defaults: those that a search chooses, that an estimate needs, and that a plan
# without a search takes.
_CHOSEN = {
    "replicate": 1,
    "strategy": STRATEGIES[0],
    "bucket_bytes": "auto",
    "remat": False,
}
_OF_ESTIMATE = {"budget": None, "compare": None, "auto": False}
_WITHOUT_PATH = {**_CHOSEN, "auto": False, "model": None, "units": None}
_OF_TRAINING = {
    "lora": None,
    "dpo": False,
    "inputs": None,
    "compare": None,
    "optimizer": "adamw",
}


def _bucket_bytes(text: str) -> int | str:
    return text if text == "auto" else at_least(0, 2**63)(text)


def _numbers(text: str) -> list[int]:
    return [at_least(1)(number) for number in text.split(",")]


def _lora(text: str) -> dict[str, Any]:
    pattern = r"r=(\d+)(?:[, ]+base=(\w+))?[, ]+targets=([\w.,]+)"
    if not (match := re.fullmatch(pattern, text)):
        raise argparse.ArgumentTypeError(
            f"must be such as r=16,targets=q_proj,v_proj; found {text!r}"
        )
    base = {"base": match[2]} if match[2] else {}
    return {"r": int(match[1]), "targets": match[3].split(","), **base}


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
        most=1_000_000,
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
        "--precision", choices=[*PRECISIONS, *STORAGES],
        help="dtype in which units compute; bf16 reduces gradients in float32; for a PATH, bf16-params keeps parameters in "
        "bfloat16 too; with --generate, nf4, int8 and fp8 store layers small (default: fp32; for a PATH, bf16)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true",
        help="print the plan alone, as JSON for Plan.from_json; for a PATH, the figures and the plan",
    )  # fmt: skip
    parser.add_argument(
        "--html", metavar="FILE",
        help="write the tables to a web page, with pictures if matplotlib is installed (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--lora", type=_lora, metavar="r=16,targets=q_proj,v_proj",
        help="for a PATH, freeze the weights, and train adapters of this rank around modules of these names; "
        "r=16,base=nf4,targets=... stores the frozen weights of layers in 4 bits, or as int8 or fp8 (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--tensor", type=at_least(1), default=1, metavar="N",
        help="for a PATH, GPUs that divide each layer, by the tensor parallelism of transformers (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dpo", action="store_true",
        help="for a PATH of a decoder, train it from preferences beside a frozen reference; a sample is a pair of answers",
    )  # fmt: skip
    parser.add_argument(
        "--generate", action="store_true",
        help="for a PATH of a decoder, generate text in place of training: does the model fit with its cache, and how many "
        "tokens a second",
    )  # fmt: skip
    parser.add_argument(
        "--no-cache", action="store_true",
        help="for a PATH, plan again, even if the folder ~/.cache/funcshard has the answer",
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
        "(default: the memory of the hardware; for a PATH, 3 GiB less on GPUs, for CUDA, NCCL and cuBLAS)",
    )  # fmt: skip
    group.add_argument(
        "--batch", type=_numbers, default=[None], metavar="N",
        help="samples of a rank in one step (default: 1; for a PATH, the fastest that fit, and 1,2,4 prints a table)",
    )  # fmt: skip
    group.add_argument(
        "--seq", type=_numbers, default=[None], metavar="N",
        help=f"tokens of a sample (default: the context of the model, at most {LONGEST}; {OTHERS} for a MODULE:CALLABLE); "
        "for a PATH, 2048,8192 prints a table",
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
        "--remat",
        action="store_true",
        help="compute all units but the root again in backward",
    )
    group.add_argument(
        "--auto", action="store_true",
        help="find the fastest plan that fits the budget: mesh, strategies, and units that backward computes again; exit "
        "code 1 if none fits",
    )  # fmt: skip
    group.add_argument(
        "--compare", metavar="FILE",
        help="estimate also the plan in this file, which --json wrote, and compare the two; for a PATH, the plan of another "
        "run of this model (default: none)",
    )  # fmt: skip


def plan_command(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    check_mesh(options.ranks, options.replicate)
    _check_together(options)
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
    shown_reports = [
        report for report in shown_items if isinstance(report, Report | Infeasible)
    ]
    return int(
        bool(options.budget or options.auto) and not all(r.fits for r in shown_reports)
    )


def _whole_run(options: argparse.Namespace) -> int:
    """Plan a run of a model of any origin, and return the exit code."""
    sizes = list(itertools.product(options.seq, options.batch))
    answers = [_answer(options, seq, batch) for seq, batch in sizes]
    shown: list[Any] = answers
    answer_json, answer_text = answers[0].json, answers[0].text
    if len(answers) > 1:
        results = [json.loads(answer.json) for answer in answers]
        shown = [_sweep_table(Path(options.path).stem, results)]
        answer_json, answer_text = (
            json.dumps(results, indent=2, ensure_ascii=False),
            str(shown[0]),
        )
    if options.html:
        _write_page(Path(options.html), shown)
    print(answer_json if options.json else answer_text)
    return int(not any(answer.fits for answer in answers))


def _sweep_table(title: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of plans of several lengths and batches."""
    trains = "step_seconds" in results[0]
    seconds_of = "step_seconds" if trains else "token_seconds"
    columns = [
        "seq",
        "batch",
        "fits",
        "reserved",
        "step" if trains else "further token",
        "tokens/s",
    ]
    rows = [
        [
            f"{result['seq']:,}",
            f"{result['batch']:,}",
            "yes" if result["fits"] else "no",
            table.size(result["reserved_bytes"]),
            table.duration(result[seconds_of]),
            f"{result['tokens_per_second']:,.0f}",
        ]
        for result in results
    ]
    if trains:
        columns += ["MFU", "recomputed units"]
        for row, result in zip(rows, results, strict=True):
            row += [f"{100 * result['mfu']:.1f} %", str(len(result["remat"]))]
    return Table(f"{title} on {results[0]['gpus']:,} × {results[0]['gpu']}", columns, rows)


def _task(options: argparse.Namespace) -> fs.Training | fs.Generation:
    """Return what the run does."""
    if options.generate:
        return fs.Generation(precision=options.precision or "bf16")
    return fs.Training(
        precision=options.precision or "bf16",
        optimizer=options.optimizer,
        lora=options.lora,
        dpo=options.dpo,
        inputs=_inputs(options),
    )


def _answer(options: argparse.Namespace, seq: int | None, batch: int | None) -> Answer:
    """Return the answer from the last time, or a new one."""
    is_ours = options.path in DECODERS or ":" in options.path
    hardware = load_hardware(options.hardware or "h100")
    question = {
        "gpus": options.ranks,
        "gpu": hardware,
        "seq": seq,
        "batch": batch,
        "budget": options.budget,
        "task": _task(options),
    }
    if options.tensor > 1:
        question["gpus"] = {"shard": options.ranks // options.tensor, AXIS: options.tensor}
    file = None
    # Note: code of yours may change, and no digest shows it.
    if not (is_ours or options.inputs or options.compare or options.no_cache):
        # Note: only a page has pictures, which take a while to draw.
        facts = {**question, "gpu": hardware.to_json(), "html": bool(options.html)}
        file = answer_file(Path(options.path), facts)
    answer = read_answer(file) if file else None
    if answer is None:
        model = _model(options.path, options) if is_ours else options.path
        run: Any = fs.plan_run(model, **question)
        shown_items = [run]
        if options.compare:
            shown_items = [_comparison(options.compare, run, hardware)]
        html = "".join(item._repr_html_() for item in shown_items)
        if options.html:
            html += "".join(_pictures([run.plan, run.report]))
        answer = Answer("\n\n".join(map(str, shown_items)), run.to_json(), html, run.fits)
        if file:
            write_answer(file, answer)
    return answer


def _comparison(path: str, run: fs.RunPlan, hardware: Hardware) -> Any:
    """Return the comparison of a run with the plan in a file, for the same batch."""
    plan, remat = _compared(path, run.plan)
    options: dict[str, Any] = {**run.report.options, "remat": remat}
    return fs.compare(
        fs.estimate(run.profile, plan, hardware=hardware, **options), run.report
    )


def _check_together(options: argparse.Namespace) -> None:
    """Raise for options that have no effect beside others, or would fail after the work is done."""
    rules: list[tuple[Any, Mapping[str, Any], str]] = [
        (options.auto, _CHOSEN, "--auto chooses mesh, strategies and remat: leave out {}"),
        (
            not options.hardware,
            _OF_ESTIMATE,
            "{} belongs to an estimate: add --hardware, e.g. h100",
        ),
        (
            True,
            {"lora": None, "tensor": 1, "dpo": False, "generate": False},
            "{} belongs to a PATH: pass one",
        ),
    ]
    several = len(options.seq) * len(options.batch) > 1
    if options.path is None and options.precision not in (None, "bf16", "fp32"):
        raise ValueError(f"--precision {options.precision} belongs to a PATH: pass one")
    if options.path is None and several:
        raise ValueError("several values of --seq and --batch belong to a PATH: pass one")
    if options.path is not None:
        remedy = "leave it out, or pass --model in place of PATH"
        rules = [
            (True, _WITHOUT_PATH, "PATH finds the plan itself; found {}: " + remedy),
            (options.generate, _OF_TRAINING, "--generate doesn't train: leave out {}"),
            (
                several,
                {"compare": None},
                "{} compares one run: pass one --seq and one --batch",
            ),
        ]
        if options.ranks % options.tensor:
            raise ValueError(
                f"--tensor must divide the {options.ranks} GPUs; found {options.tensor}: pass a divisor"
            )
    for applies, defaults, text in rules:
        for name, default in defaults.items():
            if applies and getattr(options, name) != default:
                raise ValueError(text.format(f"--{name.replace('_', '-')}"))
    if options.html and not Path(options.html).absolute().parent.is_dir():
        raise ValueError(
            f"--html must be a file in a folder that exists; found {options.html}: make the folder "
            "first"
        )


def _shown(options: argparse.Namespace, model: nn.Module) -> list[Any]:
    params = fs.make_functional(model)[1]
    units = default_units(model) if options.units is None else options.units
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
        compared_plan, _ = _compared(options.compare, plan)
    batch, seq = options.batch[0] or 1, options.seq[0] or default_seq(model)
    common = {
        "hardware": load_hardware(options.hardware),
        "optimizer": options.optimizer,
        "budget": options.budget,
    }
    traced = functools.partial(trace, model, batch, seq, inputs=_inputs(options))
    profile = traced(precision=precision)
    if options.auto:
        best_plan = fs.auto_plan(profile, ranks=options.ranks, units=units, **common)
        report = best_plan.report
        shown_items: list[Any] = [best_plan]
        if not isinstance(best_plan, Infeasible):
            shown_items += [best_plan.plan, report]
    else:
        report = fs.estimate(profile, plan, remat=options.remat, **common)
        shown_items = [plan, report]
    if compared_plan is not None:
        # Note: its units may compute in other dtypes, which are another trace.
        if any(unit.precision != precision for unit in compared_plan.unit_list):
            profile = traced(precision=compared_plan)
        compared_report = fs.estimate(profile, compared_plan, remat=options.remat, **common)
        shown_items.append(fs.compare(compared_report, report))
    return shown_items


def _inputs(options: argparse.Namespace) -> InputMaker | None:
    if options.inputs is None:
        return None
    return import_callable("--inputs", options.inputs)


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


def _compared(path: str, plan: fs.Plan) -> tuple[fs.Plan, Sequence[str]]:
    """Return the plan in a file, which must be of ``plan``'s model, and what it recomputes."""
    read_plan, remat = _read(path)
    shapes_here = {leaf.path: list(leaf.whole_shape) for leaf in plan.leaves}
    shapes_there = {leaf.path: list(leaf.whole_shape) for leaf in read_plan.leaves}
    for name in {**shapes_here, **shapes_there}:
        here, there = (
            shapes.get(name, "missing") for shapes in (shapes_here, shapes_there)
        )
        if here != there:
            raise ValueError(
                f"--compare must be a plan of the same model; found {path}: {name!r} is {there} "
                f"there and {here} here; pass the options of the model with which that plan was "
                "made"
            )
    return read_plan, remat


def _read(path: str) -> tuple[fs.Plan, Sequence[str]]:
    try:
        data = file_data.parse(read_regular(path).decode())
        if "remat" not in data:
            return fs.Plan.from_json(json.dumps(data)), ()
        # Note: --json of a PATH writes the plan among other figures.
        return fs.Plan.from_json(json.dumps(data["plan"])), data["remat"]
    except OSError as error:
        reason = f"which cannot be read ({error.strerror})"
    except ValueError as error:
        reason = f"which holds no plan ({error})"
    raise ValueError(
        f"--compare must be a file with a plan; found {path}, {reason}: write one with python -m "
        "funcshard plan --json > other.json"
    )


def _write_page(path: Path, shown: list[Any]) -> None:
    html_parts = [*(item._repr_html_() for item in shown), *_pictures(shown)]
    page_style = "body{font-family:sans-serif;margin:24px;max-width:1200px} img{max-width:100%} body>*{margin-bottom:24px}"
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>funcshard plan</title><style>{page_style}</style>'
    page_body = "".join(f"<div>{part}</div>" for part in html_parts)
    path.write_text(f"{page}{page_body}</html>\n", encoding="utf-8")


def _pictures(shown: list[Any]) -> list[str]:
    """Return the pictures of plans and reports; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    plans = [item for item in shown if isinstance(item, fs.Plan)]
    reports = [item for item in shown if isinstance(item, Report)]
    figures = [
        *map(draw_holdings, plans),
        *map(draw_memory, reports),
        *map(draw_timeline, reports),
    ]
    return list(map(_image, figures))


def _image(figure: Any) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'
