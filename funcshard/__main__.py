"""``python -m funcshard``: see ``python -m funcshard --help``."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import funcshard as fs
from funcshard._utils import tree
from funcshard.checkpoint import export_parameters, write_dcp
from funcshard.demo.arguments import (
    MOST_PROCESSES,
    add_mesh,
    add_number,
    add_sizes,
    at_least,
    check_mesh,
    gpt_config,
    positive,
)
from funcshard.demo.calibrate_command import add_calibrate, calibrate_command
from funcshard.demo.display import mebibytes
from funcshard.demo.launch import launch, world_size
from funcshard.demo.plan_command import add_plan, plan_command
from funcshard.demo.train import Settings, check, train


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(
            2, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, with ``argv`` or the process's arguments; return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot encode × shows ? instead.
            stream.reconfigure(errors="replace")
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        exit_code = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return exit_code
    except (OSError, TypeError, ValueError) as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return 1
        if os.environ.get("FUNCSHARD_TRACEBACK"):  # as for an error of a rank
            raise
        print(f"{parser.prog} {options.command}: error: {error}", file=sys.stderr)
        return 2


def _is_unread() -> bool:
    """Return whether the reader of our output has ended."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Why: Python writes the rest when it exits, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="funcshard", description="Fully sharded data parallelism as pure functions."
    )
    parser.add_argument("--version", action="version", version=fs.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_train = commands.add_parser(
        "train",
        help="train a byte-level GPT on text, on several processes of this machine or in torchrun's world",
        description="Train a byte-level GPT on Python's standard library, or on any text. Ctrl-C ends it after the current "
        "step and saves; a second Ctrl-C ends it at once.",
    )
    add_mesh(
        add_train,
        ranks="processes to start; under torchrun, this process joins torchrun's world instead",
        most=MOST_PROCESSES,
    )
    add_number(add_train, "--steps", 120, "training steps", least=0)
    add_number(add_train, "--batch", 2, "sequences a rank and step", most=2**20)
    add_train.add_argument(
        "--lr",
        type=positive,
        default=5e-4,
        metavar="RATE",
        help="highest learning rate (default: %(default)s)",
    )
    add_train.add_argument(
        "--seed",
        type=at_least(-(2**63), 2**63 - 1),
        default=0,
        metavar="N",
        help="seed of parameters, batches and sample (default: %(default)s)",
    )
    add_train.add_argument(
        "--text", metavar="PATH", help="file or folder to train on (default: the standard library's .py files)",
    )  # fmt: skip
    add_train.add_argument(
        "--out", metavar="DIR", help="folder for the result (default: runs/STRATEGY)"
    )
    add_train.add_argument(
        "--save-every", type=at_least(1), default=0, metavar="N",
        help="save a checkpoint in DIR/checkpoints every N steps, while training continues (default: none)",
    )  # fmt: skip
    add_train.add_argument(
        "--resume",
        action="store_true",
        help="resume from the last complete checkpoint in DIR/checkpoints, if there is one",
    )
    add_sizes(add_train)
    add_train.set_defaults(units=["blocks.*"])
    add_plan_command = commands.add_parser(
        "plan",
        help="print the plan for a model and a number of ranks, and estimate its step; starts no process",
        description="Print how a model would be sharded and, with --hardware, which memory, time and traffic a training "
        "step would take. No parameters are allocated and no process is started.",
    )
    add_plan(add_plan_command)
    add_sizes(add_plan_command)
    add_calibrate_command = commands.add_parser(
        "calibrate",
        help="measure this machine, and write a hardware file for plan --hardware; takes about half a minute",
        description="Measure FLOP/s, memory bandwidth and collectives of this machine's CPUs, and write them to a file "
        "for plan --hardware. It takes about half a minute, on an otherwise idle machine. With --from-step, take the "
        "hardware of a plan, and fit it to a step that you measured.",
    )
    add_calibrate(add_calibrate_command)
    add_inspect = commands.add_parser(
        "inspect",
        help="print the contents of a checkpoint, or of every checkpoint in a folder",
        description="Print the contents of a checkpoint, or of every checkpoint in a folder. No code of the checkpoint is "
        "run, and no process is started.",
    )
    add_inspect.add_argument(
        "path", metavar="PATH", help="a checkpoint, or a folder of checkpoints"
    )
    add_inspect.add_argument(
        "--check",
        action="store_true",
        help="read the whole checkpoint and compare the checksums",
    )
    convert = add_inspect.add_argument_group("write one checkpoint for other programs")
    convert.add_argument(
        "--to-dcp",
        metavar="DIR",
        help="a checkpoint of torch.distributed.checkpoint, as FSDP2 reads",
    )
    convert.add_argument(
        "--to-safetensors",
        metavar="PATH",
        help="the parameters: a .safetensors file, or a folder",
    )
    convert.add_argument(
        "--to-hf",
        metavar="DIR",
        help="a folder that AutoModel.from_pretrained reads; with --config",
    )
    convert.add_argument(
        "--config",
        metavar="DIR",
        help="a folder with the config.json of the model, for --to-hf",
    )
    convert.add_argument(
        "--tree",
        metavar="NAME",
        default="model",
        help="what to write in place of the parameters",
    )
    return parser


def _train(options: argparse.Namespace) -> int:
    world = world_size(options.ranks)
    check_mesh(world, options.replicate)
    settings = Settings(
        config=gpt_config(options), units=tuple(options.units),
        strategy=options.strategy, replicate=options.replicate, steps=options.steps, batch=options.batch, lr=options.lr,
        seed=options.seed, text=options.text, out=options.out or str(Path("runs", options.strategy)),
        save_every=options.save_every, resume=options.resume,
    )  # fmt: skip
    check(settings, world)
    return launch(train, (settings,), ranks=options.ranks, replicate=options.replicate)


def _inspect(options: argparse.Namespace) -> int:
    path = Path(options.path)
    if options.to_dcp or options.to_safetensors or options.to_hf:
        return _convert(path, options)
    folders: list[Path] = []
    if path.is_dir() and not (path / "index.json").exists():
        folders = [folder for folder in path.iterdir() if folder.is_dir()]
    # Note: PATH is one checkpoint, unless a folder in it has an index.
    if not any((folder / "index.json").exists() for folder in folders):
        print(_contents(path, options.check))  # or the error that there is no checkpoint
        return 0
    exit_code = 0
    for folder in sorted(folders, key=lambda folder: tree.natural_key(folder.name)):
        try:
            print(_contents(folder, options.check), end="\n\n")
        except (OSError, ValueError) as error:
            print(f"Not complete: {error}\n")
            # A save that was killed leaves a folder without an index, which is no fault.
            if (folder / "index.json").exists():
                exit_code = 1
    return exit_code


def _contents(path: Path, check: bool) -> fs.Contents:
    contents = fs.restore(path)
    if check:
        with mebibytes(f"Checking {path.name}") as watch:
            contents.check(watch)
    return contents


def _convert(path: Path, options: argparse.Namespace) -> int:
    if bool(options.to_hf) != bool(options.config):
        raise ValueError("--to-hf and --config need each other: pass both")
    if options.check:
        _contents(path, check=True)
    if options.to_dcp:
        with mebibytes("Converting") as watch:
            folder = write_dcp(path, Path(options.to_dcp), watch)
        print(f"Wrote {folder}")
    for target, config in ((options.to_safetensors, None), (options.to_hf, options.config)):
        if not target:
            continue
        config_folder = Path(config) if config else None
        with mebibytes("Converting") as watch:
            files = export_parameters(
                path, Path(target), tree=options.tree, config=config_folder, watch=watch
            )
        print("\n".join(f"Wrote {file}" for file in files))
    return 0


_COMMANDS = {
    "train": _train,
    "plan": plan_command,
    "inspect": _inspect,
    "calibrate": calibrate_command,
}


def run() -> NoReturn:
    """Run the command line as a process, and end it."""
    # Why: searches for garbage walk through all objects of torch and transformers, the last one
    # when the process ends, for a second. An answer makes little garbage.
    gc.freeze()
    is_plan = sys.argv[1:2] == ["plan"]
    if is_plan:
        gc.disable()
    exit_code = main()
    gc.freeze()
    if is_plan:  # nothing to clean up, and freeing those objects takes 0.3 s
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    run()
