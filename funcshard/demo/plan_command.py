"""``python -m funcshard plan``: the plan of a model, and the estimate of its step."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs
from funcshard.demo.arguments import BadInputError, add_mesh, at_least, check_mesh, import_callable
from funcshard.demo.decoder_configs import DECODERS
from funcshard.demo.decoders import decoder
from funcshard.demo.gpt import GPT, GPTConfig
from funcshard.estimate import OPTIMIZERS, Profile, Report, draw_holdings, draw_memory, draw_timeline, load_hardware

__all__ = ["add_plan", "plan_command"]

PRECISIONS = {"fp32": None, "bf16": fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
_LONGEST = 8192  # tokens of a sample by default, if the model takes so many
_OTHERS = 1024  # tokens of a sample by default for a model that has no context

_Loss = Callable[..., torch.Tensor]


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_mesh(parser, ranks="ranks to plan for")
    parser.add_argument(
        "--model", metavar="NAME", default=argparse.SUPPRESS,
        help=f"name of a published decoder, one of {', '.join(DECODERS)}; or MODULE:CALLABLE, a function without arguments "
        "that returns an nn.Module (default: the GPT of train)",
    )  # fmt: skip
    parser.add_argument(
        "--bucket-bytes", type=at_least(0), default=0, metavar="BYTES",
        help="largest size of a bucket: units that follow one another share collectives up to so many gathered bytes",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=[*PRECISIONS], default="fp32",
        help="dtype in which units compute; bf16 reduces gradients in float32",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan alone, as JSON for Plan.from_json")
    parser.add_argument(
        "--html", metavar="FILE", default=argparse.SUPPRESS,
        help="write the tables to a web page, with pictures if matplotlib is installed (default: none)",
    )  # fmt: skip
    group = parser.add_argument_group("estimate")
    group.add_argument(
        "--hardware", metavar="NAME", default=argparse.SUPPRESS,
        help="estimate memory, time and traffic of a step on this hardware: a name such as h100, or a file that calibrate "
        "wrote (default: no estimate)",
    )  # fmt: skip
    group.add_argument(
        "--budget", metavar="SIZE", default=argparse.SUPPRESS,
        help="memory of a rank, such as 80GiB; a higher peak gives exit code 1 (default: the memory of the hardware)",
    )  # fmt: skip
    group.add_argument("--batch", type=at_least(1), default=1, metavar="N", help="samples of a rank in one step")
    group.add_argument(
        "--seq", type=at_least(1), metavar="N", default=argparse.SUPPRESS,
        help=f"tokens of a sample (default: the context of the model, at most {_LONGEST}; {_OTHERS} for a MODULE:CALLABLE)",
    )  # fmt: skip
    group.add_argument(
        "--inputs", metavar="MODULE:CALLABLE", default=argparse.SUPPRESS,
        help="function of batch and seq that returns the inputs of the model as a tuple (default: tokens of shape [batch, "
        "seq], with cross entropy as the loss)",
    )  # fmt: skip
    group.add_argument("--optimizer", choices=[*OPTIMIZERS], default="adamw", help="optimizer that updates the shards")
    group.add_argument("--remat", action="store_true", help="compute all units but the root again in backward")
    group.add_argument(
        "--compare", metavar="FILE", default=argparse.SUPPRESS,
        help="estimate also the plan in this file, which --json wrote, and compare the two (default: none)",
    )  # fmt: skip


def plan_command(options: argparse.Namespace, gpt: Callable[[], GPTConfig]) -> int:
    """Run the command, and return its exit code.

    Arguments:
        options: the arguments.
        gpt: the sizes of the GPT, if no model is named.
    """
    check_mesh(options.ranks, options.replicate)
    for name in ("budget", "compare"):
        if hasattr(options, name) and not hasattr(options, "hardware"):
            raise BadInputError(f"--{name} belongs to an estimate: add --hardware, such as --hardware h100")
    model = _model(options, gpt)
    units = getattr(options, "units", None)
    mesh = {"replicate": options.replicate, "shard": options.ranks // options.replicate}
    try:
        apply, params, buffers = fs.make_functional(model)
        plan = fs.make_plan(
            params, mesh, units=_listed(model) if units is None else units, strategy=options.strategy,
            bucket_bytes=options.bucket_bytes, precision=PRECISIONS[options.precision],
        )  # fmt: skip
        shown: list[Any] = [plan]
        if hasattr(options, "hardware"):
            estimate = _Estimate(options, model, apply, params, buffers)
            shown.append(estimate(plan))
            if hasattr(options, "compare"):
                shown.append(fs.compare(estimate(_read(options.compare)), shown[-1]))
    except (OSError, TypeError, ValueError) as error:
        raise BadInputError(error) from error
    if hasattr(options, "html"):
        _write_page(Path(options.html), shown)
    print(plan.to_json() if options.json else "\n\n".join(map(str, shown)))
    return 1 if hasattr(options, "budget") and not shown[1].fits else 0


def _model(options: argparse.Namespace, gpt: Callable[[], GPTConfig]) -> nn.Module:
    spec = getattr(options, "model", None)
    make: Callable[[], Any]
    if spec is None:
        make = lambda: GPT(gpt())  # noqa: E731
    elif ":" in spec:
        make = import_callable("--model", spec)
    elif spec in DECODERS:
        make = lambda: decoder(spec)  # noqa: E731
    else:
        raise BadInputError(f"--model must be MODULE:CALLABLE, or one of {', '.join(DECODERS)}; found {spec!r}")
    with torch.device("meta"):
        try:
            model = make()
        except BadInputError:
            raise
        except Exception as error:
            raise BadInputError(f"--model {spec} failed on the meta device: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise BadInputError(f"--model {spec} must return a torch.nn.Module; it returned {type(model).__name__}")
    return model


class _Estimate:
    """Estimates plans of one model; a trace serves all plans of its precision."""

    def __init__(self, options: argparse.Namespace, model: nn.Module, apply: Any, params: Any, buffers: Any) -> None:
        self.options, self.functional = options, (apply, params, buffers)
        self.hardware = load_hardware(options.hardware)
        config = getattr(model, "config", None)
        context = min(getattr(config, "context", _OTHERS), _LONGEST)
        size = options.batch, getattr(options, "seq", context)
        if hasattr(options, "inputs"):
            self.loss, self.targets = None, None
            with torch.device("meta"):
                self.inputs = import_callable("--inputs", options.inputs)(*size)
            if not isinstance(self.inputs, tuple):
                raise TypeError(f"--inputs {options.inputs} must return a tuple; it returned {type(self.inputs).__name__}")
        else:
            self.inputs = (torch.empty(size, dtype=torch.int64, device="meta"),)
            self.loss, self.targets = _cross_entropy, self.inputs[0]
        self.profiles: dict[Any, Profile] = {}

    def __call__(self, plan: fs.Plan) -> Report:
        precisions = tuple(unit.precision for unit in plan.unit_list)
        if precisions not in self.profiles:
            try:
                self.profiles[precisions] = fs.profile(
                    *self.functional, *self.inputs, loss=self.loss, targets=self.targets, precision=plan
                )
            except Exception as error:  # any error of the user's own model
                first = str(error).partition("\n")[0]
                raise BadInputError(f"the model failed on its inputs: {type(error).__name__}: {first}") from error
        return fs.estimate(
            self.profiles[precisions], plan, hardware=self.hardware, optimizer=self.options.optimizer,
            remat=self.options.remat, budget=getattr(self.options, "budget", None),
        )  # fmt: skip


def _cross_entropy(logits: Any, targets: torch.Tensor) -> torch.Tensor:
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != targets.shape:
        found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(
            f"the model must return logits [batch, seq, vocabulary] for tokens of shape {list(targets.shape)}; found "
            f"{found}: give --inputs, and let the model return its loss"
        )
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def _listed(model: nn.Module) -> list[str]:
    """Return the names of the modules in the outermost lists of a model, which are its layers."""
    units: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{unit}.") for unit in units):
            units += [
                f"{name}.{child}" for child, below in module.named_children() if next(below.parameters(), None) is not None
            ]
    return units


def _read(path: str) -> fs.Plan:
    try:
        return fs.Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise BadInputError(f"--compare must be a file with a plan, which --json writes; found {path}: {error}") from error


def _write_page(path: Path, shown: list[Any]) -> None:
    parts = [each._repr_html_() for each in shown]
    if importlib.util.find_spec("matplotlib") is not None:
        pictures = [draw_holdings(shown[0])]
        pictures += [draw(each) for each in shown if isinstance(each, Report) for draw in (draw_memory, draw_timeline)]
        parts += [_image(figure) for figure in pictures]
    style = "body{font-family:sans-serif;margin:24px;max-width:1200px} img{max-width:100%} body>*{margin-bottom:24px}"
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>funcshard plan</title><style>{style}</style>'
    try:
        path.write_text(page + "".join(f"<div>{part}</div>" for part in parts) + "</html>\n", encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"cannot write --html: {error}") from error


def _image(figure: Any) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'
