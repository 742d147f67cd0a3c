"""Files are damaged: each reader gives the right data or an error of ours, and ``latest`` passes over them."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.hostile.blame import outcome_of
from tests.hostile.campaign import Campaign, slowness, within
from tests.hostile.damage import damage
from tests.states import equal

pytestmark = pytest.mark.hostile

HANG = 5.0  # seconds after which a reader counts as one that hangs
NET = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
APPLY, PARAMS, BUFFERS = fs.make_functional(NET)
READS = (ValueError, OSError)


def saved_at(step: int, plan: fs.Plan, mesh: fs.Mesh) -> Any:
    full = {name: leaf.detach() * step + mesh.world_size * 0 for name, leaf in PARAMS.items()}
    return {"train": fs.shard(full, plan, mesh), "step": step, "own": fs.PerRank({"rank": mesh.rank})}


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    """Two checkpoints of two ranks, files of safetensors, a plan and a recording, all undamaged."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        folder = Path(name)

        def main(mesh: fs.Mesh) -> None:
            plan = fs.make_plan(PARAMS, mesh, units=["0"])
            for step in (1, 2):
                fs.save(folder / "checkpoints" / f"step-{step}", saved_at(step, plan, mesh), plan, mesh)
            shards = fs.shard(PARAMS, plan, mesh)
            fs.export_safetensors(folder / "one" / "model.safetensors", shards, plan, mesh)
            fs.export_safetensors(folder / "several", shards, plan, mesh, max_shard_size=200)

        for each in ("one", "several", "plan", "recording"):
            (folder / each).mkdir()
        fs.simulate(main, 2)
        plan, mesh = fs.make_plan(PARAMS, 1, units=["0"]), fs.Mesh()
        (folder / "plan" / "plan.json").write_text(plan.to_json())
        step, state, batch = make_step(plan, mesh)
        fs.trace(step, state, batch).save(folder / "recording" / "step.traced")
        yield folder


def make_step(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    sharded = fs.fully_shard(APPLY, plan, mesh)
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
    step = fs.make_train_step(lambda s, b, x: sharded(s, b, x).square().mean(), optimizer, plan, mesh)
    return step, step.init(fs.shard(PARAMS, plan, mesh), BUFFERS), torch.ones(2, 6)


# --- the readers, each called on a damaged copy ---------------------------------------------------


def read_checkpoints(folder: Path, what: str) -> dict[str, int]:
    plan, mesh, counts = fs.make_plan(PARAMS, 1, units=["2"]), fs.Mesh(), Counter[str]()
    right, whole = set(), set()  # restored with the right bits; and with no byte changed in any file
    for step in (1, 2):
        path = folder / f"step-{step}"
        state = outcome_of(lambda path=path: fs.restore(path, plan, mesh), f"{what}; restore {path.name}", READS)
        if isinstance(state, Exception):
            assert str(path) in str(state) or path.name in str(state), f"{what}; the error names no file: {state}"
            counts["rejected"] += 1
        else:
            assert equal(state["train"], saved_at(step, plan, mesh)["train"]), f"{what}; restore {path.name} gave other bits"
            assert state["step"] == step, what
            right.add(path)
        contents = outcome_of(lambda path=path: fs.restore(path), f"{what}; describe {path.name}", READS)
        if not isinstance(contents, Exception):
            checked = outcome_of(contents.check, f"{what}; check {path.name}", READS)
            if isinstance(checked, Exception):
                counts["rejected by check"] += 1
            elif path not in right:
                raise AssertionError(f"{what}; restore {path.name} raises, and check does not")
            else:
                whole.add(path)
                counts["untouched by the damage"] += 1
            outcome_of(lambda contents=contents: str(contents), f"{what}; print {path.name}", READS)
        elif path in right:
            raise AssertionError(f"{what}; restore {path.name} is right, and its description raises {contents}")
    last = fs.latest(folder, thorough=True)
    assert last is None or last in right, f"{what}; latest(thorough=True) gives {last}, which is damaged"
    assert last is not None or not whole, f"{what}; latest gives none, and {sorted(whole)} are whole"
    quick = fs.latest(folder)
    assert quick is None or quick.parent == folder, what
    return dict(counts)


def read_safetensors(folder: Path, what: str) -> dict[str, int]:
    plan, path = fs.make_plan(PARAMS, 1), folder
    if not (folder / "model.safetensors.index.json").exists() and list(folder.glob("*.safetensors")):
        path = next(iter(sorted(folder.glob("*.safetensors"))))
    found = outcome_of(lambda: fs.import_safetensors(path, plan, fs.Mesh()), what, READS)
    return {"rejected": int(isinstance(found, Exception))}


def read_plan(folder: Path, what: str) -> dict[str, int]:
    file = folder / "plan.json"
    if not file.is_file():
        return {}
    text = file.read_bytes().decode(errors="replace")
    found = outcome_of(lambda: fs.Plan.from_json(text), what, (ValueError, TypeError))
    if isinstance(found, fs.Plan):
        mesh = fs.Mesh()
        outcome_of(lambda: fs.gather(fs.shard(PARAMS, found, mesh), found, mesh), f"{what}; shard and gather", READS)
        outcome_of(lambda: str(found), f"{what}; print", READS)
    return {"rejected": int(isinstance(found, Exception))}


def read_recording(folder: Path, what: str) -> dict[str, int]:
    found = outcome_of(lambda: fs.load_traced(folder / "step.traced", fs.Mesh()), what, (ValueError, TypeError, OSError))
    if not isinstance(found, Exception):
        plan, mesh = fs.make_plan(PARAMS, 1, units=["0"]), fs.Mesh()
        _, state, batch = make_step(plan, mesh)
        outcome_of(lambda: found(state, batch), f"{what}; run the step", (ValueError, TypeError, RuntimeError))
    return {"rejected": int(isinstance(found, Exception))}


READERS: dict[str, Callable[[Path, str], dict[str, int]]] = {
    "checkpoints": read_checkpoints,
    "one": read_safetensors,
    "several": read_safetensors,
    "plan": read_plan,
    "recording": read_recording,
}


def digest_of(folder: Path) -> str:
    """Return a digest of a folder's names and bytes, without opening pipes."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path.relative_to(folder)).encode())
        found.update(path.read_bytes() if path.is_file() and not path.is_symlink() else b"another kind")
    return found.hexdigest()


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_gets_a_clear_error_or_the_data_is_right(campaign: Campaign, kind: str, whole: Path) -> None:
    def one(draw: Random) -> dict[str, int]:
        with tempfile.TemporaryDirectory(prefix="hostile-") as name:
            folder = Path(name) / kind
            shutil.copytree(whole / kind, folder)
            what = "; ".join(damage(draw, folder) for _ in range(draw.choice([1, 1, 1, 2])))
            before = digest_of(folder)
            with within(HANG * slowness()):
                counts = READERS[kind](folder, what)
            assert digest_of(folder) == before, f"{what}; reading changed the files"
            return {"damaged files": 1, **counts}

    campaign.run(one, short=25, full=1000, limit=2 * HANG)
