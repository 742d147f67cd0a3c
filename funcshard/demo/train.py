"""The job: train a GPT on text, fully sharded, as a pure function."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import funcshard as fs
from funcshard.demo.corpus import Corpus, batch, load_corpus, windows
from funcshard.demo.display import Show, progress, say
from funcshard.demo.gpt import GPT, GPTConfig
from funcshard.demo.launch import Stop

Model = Callable[
    [torch.Tensor], torch.Tensor
]  # bytes to logits; all ranks must call it together

WINDOWS = 64  # number of windows of held-out text, over all ranks
TEMPERATURE = 0.8  # of samples: a lower one makes likely bytes likelier


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the job.

    Attributes:
        units: globs of the units.
        batch: sequences a rank and step.
        text: file or folder to train on; ``None``: Python's standard library.
        save_every: number of steps between checkpoints; 0 saves none.
        resume: whether to resume from the last checkpoint in ``out``.
    """

    config: GPTConfig
    units: tuple[str, ...]
    strategy: str
    replicate: int
    steps: int
    batch: int
    lr: float
    seed: int
    text: str | None
    out: str
    save_every: int = 0
    resume: bool = False

    @property
    def checkpoints(self) -> Path:
        return Path(self.out).resolve() / "checkpoints"


def check(settings: Settings, world_size: int) -> None:
    """Raise for settings that would fail on every rank."""
    with torch.device("meta"):
        params = fs.make_functional(GPT(settings.config))[1]
    mesh = {"replicate": settings.replicate, "shard": world_size // settings.replicate}
    # For their errors: each rank makes its plan, and reads the text.
    fs.make_plan(params, mesh, units=settings.units, strategy=settings.strategy)
    load_corpus(settings.text, settings.config.context)
    out = Path(settings.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder --out {out}: {error.strerror}") from error
    if not os.access(out, os.W_OK):
        raise ValueError(f"cannot write to the folder --out {out}")


def train(mesh: fs.Mesh, stop: Stop, settings: Settings) -> None:
    """Train, validate, sample and save, on every rank."""
    job_began = time.perf_counter()
    is_first, config, out = mesh.rank == 0, settings.config, Path(settings.out).resolve()
    tell: Callable[..., None] = say if is_first else lambda *_: None
    corpus = load_corpus(settings.text, config.context)
    torch.manual_seed(
        settings.seed
    )  # every rank draws the same parameters and keeps its shards
    apply, params, buffers = fs.make_functional(GPT(config))
    plan = fs.make_plan(params, mesh, units=settings.units, strategy=settings.strategy)
    if is_first:
        _introduce(plan, mesh, settings, corpus)
    shards = fs.shard(params, plan, mesh)
    del params
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(
        shards: Any, buffers: Any, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        inputs, targets = batch
        return loss_of(sharded(shards, buffers, inputs), targets)

    optimizer = fs.torch_optimizer(
        torch.optim.AdamW,
        lr=lambda step: _schedule(step, settings),
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, max_norm=1.0)
    state, losses = step.init(shards, buffers), []
    del shards  # the step updates them in place
    last_checkpoint = None
    # Note: no rank saves yet, so each finds the same checkpoint by itself.
    if settings.resume:
        last_checkpoint = fs.latest(settings.checkpoints, thorough=True)
    if last_checkpoint is not None:
        restored = fs.restore(last_checkpoint, plan, mesh)
        state, losses = restored["train"], restored["losses"].tolist()
        tell(f"Resumed from {last_checkpoint}")
    first_step, last_saving = state.step, None

    # Note: it reads the state of the moment, so it serves before and after training.
    def model(inputs: torch.Tensor) -> torch.Tensor:
        return sharded(state.shards, state.buffers, inputs)

    def validate(when: str) -> float:
        title, size = f"Validation {when}", settings.batch
        with progress(title, passes(mesh, size), quiet=not is_first) as show:
            loss = validation_loss(
                model, corpus.valid, mesh, size=size, context=config.context, show=show
            )
        tell(f"{title}: {loss:.3f} nats per byte ({loss / math.log(2):.3f} bits per byte)")
        return loss

    loss_before = validate("before")
    training_began = time.perf_counter()
    tokens = settings.batch * config.context
    meter = fs.make_meter(mesh, tokens=tokens, step=first_step)

    def save(wait: bool) -> fs.Saving:
        all_losses = torch.tensor(losses, dtype=torch.float64, device="cpu")
        path = settings.checkpoints / f"step-{state.step}"
        contents = {"train": state, "losses": all_losses}
        return fs.save(path, contents, plan, mesh, wait=wait, after=last_saving, keep=2)

    with progress("Training", settings.steps, quiet=not is_first, keep=True) as show:
        # Ranks agree before each step, because a step of some ranks alone would never end.
        while state.step < settings.steps and not stop.agreed(mesh):
            inputs, targets = batch(
                corpus.train,
                seed=settings.seed,
                step=state.step,
                rank=mesh.rank,
                size=settings.batch,
                context=config.context,
            )
            state, step_metrics = step(
                state, (inputs.to(mesh.device), targets.to(mesh.device))
            )
            values = meter(state, step_metrics)
            losses.append(values["loss"])
            show(
                state.step,
                f"loss {values['loss']:.3f}  {values['tokens_per_second']:,.0f} tokens/s",
            )
            if settings.save_every and state.step % settings.save_every == 0:
                last_saving = save(wait=False)
    training_seconds = time.perf_counter() - training_began
    if stop.happened:
        tell(f"Stopped after {state.step} of {settings.steps} steps")
    # Why first: a later failure then loses no steps.
    if settings.save_every and state.step > first_step:
        if state.step % settings.save_every:
            last_saving = save(wait=True)
        elif last_saving is not None:
            last_saving.wait()
        tell(f"Saved the checkpoint {settings.checkpoints / f'step-{state.step}'}")

    state_dict = fs.to_state_dict(state.shards, plan, mesh)
    if is_first:
        torch.save(state_dict, out / "model.pt")
        (out / "plan.json").write_text(plan.to_json() + "\n")
    loss_after = validate("after") if state.step else loss_before
    sample_length = 60 if stop.happened else 200
    with progress("Sampling", sample_length, quiet=not is_first) as show:
        sample_text = sample(
            model,
            mesh,
            length=sample_length,
            context=config.context,
            seed=settings.seed,
            show=show,
        )
    if not is_first:
        return
    token_rate = tokens * mesh.world_size * (state.step - first_step) / training_seconds
    summary = {
        "settings": asdict(settings),
        "mesh": mesh.shape,
        "plan": plan.fingerprint(),
        "steps": state.step,
        "stopped": stop.happened,
        "validation": {"before": loss_before, "after": loss_after, "unit": "nats per byte"},
        "losses": losses,
        "tokens_per_second": token_rate,
        "seconds": {"training": training_seconds, "all": time.perf_counter() - job_began},
        "sample": sample_text,
    }
    (out / "metrics.json").write_text(json.dumps(summary, indent=1) + "\n")
    say("Sample")
    for line in sample_text.split("\n"):
        for begin in range(0, max(1, len(line)), 90):
            say(f"  │ {line[begin : begin + 90]}".rstrip())
    say(
        f"\n{state.step} steps in {training_seconds:.0f} s, {token_rate:,.0f} tokens/s; "
        f"validation loss {loss_before:.3f} → {loss_after:.3f} nats per byte"
    )
    say(f"Saved model.pt, plan.json and metrics.json in {out}")


def _schedule(step: int, settings: Settings) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine down to a twentieth."""
    warm_up = max(1, settings.steps // 20)
    if step < warm_up:
        return settings.lr * (step + 1) / warm_up
    decay_fraction = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * decay_fraction)))


def _introduce(plan: fs.Plan, mesh: fs.Mesh, settings: Settings, corpus: Corpus) -> None:
    config, threads = settings.config, torch.get_num_threads()
    say(f"funcshard {fs.__version__}")
    say(
        f"Ranks   {mesh.world_size} on {mesh.device.type}, {threads} thread{'s' * (threads > 1)} "
        f"each; {settings.batch} × {config.context} bytes a rank and step"
    )
    say(
        f"Model   GPT of {sum(leaf.numel for leaf in plan.leaves):,} parameters: width "
        f"{config.width}, layers {config.layers}, heads {config.heads}"
    )
    say(f"Text    {corpus.description}")
    say(f"\n{plan}\n")


# --- evaluation -----------------------------------------------------------------------------------


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def passes(mesh: fs.Mesh, size: int) -> int:
    """Return the batches that each rank runs in ``validation_loss``."""
    return -(-WINDOWS // (size * mesh.world_size))


@torch.no_grad()
def validation_loss(
    model: Model, data: torch.Tensor, mesh: fs.Mesh, *, size: int, context: int, show: Show
) -> float:
    """Return the mean loss over windows of held-out bytes, the same on any number of ranks.

    Arguments:
        size: windows a batch.
        context: bytes a window.
    """
    inputs, targets = windows(data, count=WINDOWS, context=context)
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for pass_index in range(passes(mesh, size)):
        # Why weights: every forward contains collectives, so all ranks run the same number of
        # batches. A rank that has no window left repeats the last one with weight zero.
        first = pass_index * size
        window_indices = (
            torch.arange(first, first + size, device="cpu") * mesh.world_size + mesh.rank
        )
        weights = (window_indices < len(inputs)).to(mesh.device)
        window_indices = window_indices.clamp(max=len(inputs) - 1)
        logits = model(inputs[window_indices].to(mesh.device)).transpose(1, 2)
        byte_losses = F.cross_entropy(
            logits, targets[window_indices].to(mesh.device), reduction="none"
        )
        totals += torch.stack([(byte_losses.mean(1) * weights).sum(), weights.sum()])
        show(pass_index + 1, "")
    # Sums and counts are added up, since ranks may have different numbers of windows.
    loss, count = fs.psum(totals, mesh).tolist()
    return loss / count


@torch.no_grad()
def sample(
    model: Model,
    mesh: fs.Mesh,
    *,
    length: int,
    context: int,
    seed: int,
    show: Show,
) -> str:
    """Let the model write ``length`` bytes after a line break, the same on every rank.

    Arguments:
        context: the most bytes that the model sees.
    """
    # One seed for all ranks, which call the model together and need the same bytes.
    generator = torch.Generator().manual_seed(seed)
    # The model has to see something, and a line begins after a break.
    written_bytes = list(b"\n")
    for sample_index in range(length):
        logits = model(torch.tensor([written_bytes[-context:]], device=mesh.device))[0, -1]
        next_probabilities = (logits.float().cpu() / TEMPERATURE).softmax(0)
        written_bytes.append(
            int(torch.multinomial(next_probabilities, 1, generator=generator))
        )
        show(sample_index + 1, "")
    text = (
        bytes(written_bytes[1:])
        .decode(errors="replace")
        .replace("\ufffd", "·")
        .expandtabs(4)
    )
    # A terminal would obey control characters.
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
