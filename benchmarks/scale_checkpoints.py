"""Index and restore planning of a checkpoint of many ranks: ``python -m benchmarks.scale_checkpoints``.

One process writes the parts of those ranks of a job of 1,024 that one rank of another job needs,
and restores as that rank. No other part exists, so a rank that read another one's files would fail.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

import funcshard as fs
from benchmarks.fake_ranks import fake_mesh
from benchmarks.scale import Phases
from funcshard.checkpoint.contents import write_index
from funcshard.checkpoint.flatten_state import flatten_state
from funcshard.checkpoint.rank_files import table_file, write_rank
from funcshard.checkpoint.unflatten_state import Saved, unflatten_state

PHASES = ("flatten", "restore planning", "restore")
HEADER = ("units", "from ranks", "to ranks", *(f"{phase}, ms" for phase in PHASES), "index, KiB", "a table, KiB",
          "tables read")  # fmt: skip
WIDTH, SAVE = 64, "01234567"
MOVES: tuple[tuple[dict[str, int], dict[str, int]], ...] = (
    ({"shard": 8}, {"shard": 6}),
    ({"shard": 1024}, {"shard": 768}),
    ({"shard": 1024}, {"replicate": 8, "shard": 96}),
    ({"replicate": 8, "shard": 128}, {"shard": 768}),
    ({"shard": 16384}, {"shard": 12288}),
)


class CheckpointScale(NamedTuple):
    """The measurements of one rank.

    Attributes:
        index: bytes of the index.
        table: bytes of one rank's table.
        tables: number of ranks whose tables and files the restoring rank reads.
    """

    seconds: dict[str, float]
    index: int
    table: int
    tables: int


def measure_checkpoint(units: int, old: Mapping[str, int], new: Mapping[str, int], *, rank: int = 5) -> CheckpointScale:
    """Save the parts that one rank needs on the old mesh, and restore them as this rank on the new one.

    Each unit has a leaf of 64 × 64 and one of 64 elements.
    """
    seconds = Phases()
    params = {str(i): {"w": torch.zeros(WIDTH, WIDTH), "b": torch.zeros(WIDTH)} for i in range(units)}
    plans = [fs.make_plan(params, shape, units=["*"]) for shape in (old, new)]
    flat = seconds.timed("flatten", lambda: flatten_state(_state(plans[0], 0), plans[0], 0))
    ranks: set[int] = set()
    saved = Saved(flat.spec, [], flat.shared, plans[0], lambda out, source, name, begin: ranks.add(source))
    seconds.timed("restore planning", lambda: unflatten_state(saved, plans[1], rank, torch.device("cpu")))
    # Why in memory: the disk's time is none of a rank's.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        path = Path(folder, "step")
        path.mkdir()
        for each in {*ranks, rank % plans[0].world_size}:
            own = flatten_state(_state(plans[0], each), plans[0], each)
            write_rank(path, SAVE, each, own, own.tensors)
        write_index(path, plans[0], flat, SAVE, 1, 0)
        (path / f"{SAVE}.part").rename(path / "index.json")
        mesh = fake_mesh(new, rank=rank)
        restored = seconds.timed("restore", lambda: fs.restore(path, plans[1], mesh))
        torch.testing.assert_close(restored, _state(plans[1], rank), rtol=0, atol=0)
        index, table = (path / "index.json").stat().st_size, (path / table_file(SAVE, min(ranks))).stat().st_size
    return CheckpointScale(seconds, index, table, len(ranks))


def _state(plan: fs.Plan, rank: int) -> dict[str, Any]:
    """Return one rank's parameters and AdamW's averages: the number of each element in its leaf."""
    shards: dict[str, Any] = {}
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            shard = torch.zeros(buffer.shard_numel)
            for leaf in buffer.leaves:
                part = buffer.part(leaf, rank % plan.mesh_shape[1])
                shard[part.in_shard] = torch.arange(part.begin, part.end).float()
            shards[unit.name] = {buffer.key: shard}
    return {"shards": shards, "exp_avg": tree_map(torch.clone, shards), "exp_avg_sq": tree_map(torch.clone, shards)}


def main() -> None:
    """Print a table of the command line's numbers of units."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_checkpoints", description=__doc__.split("\n")[0])
    parser.add_argument("--units", type=int, nargs="+", default=[100, 1000], help="numbers of units (default %(default)s)")
    options = parser.parse_args()
    measure_checkpoint(2, {"shard": 2}, {"shard": 3}, rank=1)  # imports
    print("|", " | ".join(HEADER), "|\n|", " | ".join("---" for _ in HEADER), "|")
    for units in options.units:
        for old, new in MOVES:
            found = measure_checkpoint(units, old, new)
            shapes = [" × ".join(f"{size:,}" for size in shape.values()) for shape in (old, new)]
            times = [f"{1000 * found.seconds[phase]:,.0f}" for phase in PHASES]
            sizes = [f"{found.index / 1024:,.0f}", f"{found.table / 1024:,.0f}"]
            print("|", " | ".join([f"{units:,}", *shapes, *times, *sizes, str(found.tables)]), "|", flush=True)


if __name__ == "__main__":
    main()
