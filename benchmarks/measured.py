"""Steps of Hugging Face models on one GPU: memory in use, reserved memory, time, and the estimate.

``measured_h100.json`` holds what an H100 measured. ``python -m benchmarks.gpu --parts memory``
measures the same steps on another device, and ``python -m benchmarks.measured`` prints the file beside
the estimates; tests compare the two.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import funcshard as fs
from benchmarks.results import Table

FILE = Path(__file__).with_name("measured_h100.json")
_WARM, _ROUNDS = 2, 4  # steps
HEADER = ["step", "in use", "estimate", "error", "reserved", "÷ in use", "ms", "estimate", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A training step of a model with AdamW, fused, at world size 1.

    Attributes:
        model: name of a class of ``transformers``.
        config: what differs from the defaults of its configuration.
        block: name of the class whose modules are units.
        dtype: dtype of parameters and optimizer.
        param_dtype: dtype of the computation, if it is another.
        batch, length: number of samples, and of tokens in each; 0 for images of 224 × 224 pixels.
        remat: whether the units are computed again in backward.
        allocated, reserved: bytes in use at the peak of a step, and those that the allocator held.
        milliseconds: of a step.
    """

    model: str
    config: Mapping[str, Any]
    block: str
    dtype: str
    param_dtype: str | None
    batch: int
    length: int
    remat: bool
    allocated: int
    reserved: int
    milliseconds: float

    @property
    def title(self) -> str:
        """Name, dtypes and sizes."""
        layers = next(self.config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in self.config)
        width = next(self.config[key] for key in ("hidden_size", "n_embd", "d_model") if key in self.config)
        dtypes = self.dtype if self.param_dtype is None else f"{self.dtype}, {self.param_dtype}"
        size = f"{self.batch} × {self.length}" if self.length else f"{self.batch} images"
        again = ", recomputed" if self.remat else ""
        return f"{self.model.partition('For')[0]} {layers} × {width}, {dtypes}, {size}{again}"


def read_steps(file: Path = FILE) -> list[MeasuredStep]:
    """Return the steps of a file."""
    return [MeasuredStep(**step) for step in json.loads(file.read_text())]


def write_steps(steps: Sequence[MeasuredStep], file: Path) -> None:
    """Write steps to a file, one on a line."""
    file.write_text("[\n" + ",\n".join(json.dumps(asdict(step)) for step in steps) + "\n]\n")


def measure_step(step: MeasuredStep) -> MeasuredStep:
    """Return a step with the memory and the time that it takes on the current GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    device = torch.device("cuda")
    apply, params, buffers, plan, remat, inputs = _prepared(step, device)
    mesh = fs.Mesh(device=device)
    sharded = fs.fully_shard(apply, plan, mesh, remat=remat)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    loss_fn = lambda shards, buffers, inputs: sharded(shards, buffers, **inputs).loss  # noqa: E731
    train_step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
    state = train_step.init(fs.shard(params, plan, mesh), buffers)
    del params
    walls = []
    for i in range(_WARM + _ROUNDS):
        torch.cuda.synchronize()
        if i == _WARM:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        state, _ = train_step(state, inputs)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - begin)
    return replace(
        step,
        allocated=torch.cuda.max_memory_allocated() - before,
        reserved=torch.cuda.max_memory_reserved(),
        milliseconds=round(1e3 * statistics.median(walls[_WARM:]), 1),
    )


def estimate_step(step: MeasuredStep, hardware: str = "h100-8x400gbps") -> Any:
    """Return the report of ``fs.estimate`` on a step; it needs no GPU."""
    apply, params, buffers, plan, remat, inputs = _prepared(step, torch.device("meta"))
    profile = fs.profile(apply, params, buffers, loss=lambda out: out.loss, precision=plan, **inputs)
    return fs.estimate(profile, plan, hardware=hardware, optimizer="adamw_fused", remat=remat)


def steps_table(steps: Sequence[MeasuredStep]) -> tuple[Table, float]:
    """Return a table of measured steps beside their estimates, and the largest error of memory."""
    rows, worst = [], 0.0
    for step in steps:
        report = estimate_step(step)
        errors = report.peak / step.allocated - 1, 1e3 * report.step_time / step.milliseconds - 1
        worst = max(worst, abs(errors[0]))
        reserved = [f"{step.reserved / 2**30:.2f}", f"{step.reserved / step.allocated:.2f}"]
        memory = [f"{step.allocated / 2**30:.2f}", f"{report.peak / 2**30:.2f}", f"{100 * errors[0]:+.1f} %"]
        times = [f"{step.milliseconds:.0f}", f"{1e3 * report.step_time:.0f}", f"{100 * errors[1]:+.0f} %"]
        rows.append([step.title, *memory, *reserved, *times])
    return Table("Memory in GiB, and milliseconds a step", HEADER, rows), worst


def _prepared(step: MeasuredStep, device: torch.device) -> tuple[Any, Any, Any, fs.Plan, list[str], dict[str, Any]]:
    """Return the results of ``make_functional``, the plan, what is recomputed, and the inputs."""
    import transformers

    model_class = getattr(transformers, step.model)
    usual, dtype = torch.get_default_dtype(), getattr(torch, step.dtype)
    torch.set_default_dtype(dtype)
    try:
        with device:
            config = model_class.config_class(**step.config)
            config._attn_implementation = "sdpa"
            model = model_class(config).train()
    finally:
        torch.set_default_dtype(usual)
    unit_class = next(type(module) for module in model.modules() if type(module).__name__ == step.block)
    units = fs.wrap.by_class(unit_class)(model)
    generator = torch.Generator().manual_seed(1)
    if step.length:
        tokens = torch.randint(config.vocab_size, (step.batch, step.length), generator=generator).to(device)
        inputs = {"input_ids": tokens, "labels": tokens}
    else:
        images = torch.randn(step.batch, 3, 224, 224, generator=generator).to(device, dtype)
        inputs = {"pixel_values": images, "labels": torch.zeros(step.batch, dtype=torch.long, device=device)}
    apply, params, buffers = fs.make_functional(model)
    precision = None if step.param_dtype is None else fs.MixedPrecision(getattr(torch, step.param_dtype))
    plan = fs.make_plan(params, 1, units=units, precision=precision)
    return apply, params, buffers, plan, units if step.remat else [], inputs


if __name__ == "__main__":
    print(steps_table(read_steps())[0].page())
