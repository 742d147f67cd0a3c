"""A rank of the job on two hosts: it trains, and writes how its axes communicate, and a digest.

torchrun starts it as ``python -m tests.hostile.host_program SHAPE FOLDER``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import funcshard as fs
from tests.hostile.training import STEPS, make_program


def main() -> None:
    shape, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    mesh = fs.init_mesh(shape, device="cpu")
    ways = {axis: way(group) for axis, group in mesh.groups.items()}
    found = {"rank": mesh.rank, "ways": ways, "digest": train(mesh)}
    Path(folder, f"rank-{mesh.rank}.json").write_text(json.dumps(found))


def train(mesh: fs.Mesh) -> str:
    """Take all steps, and return a digest of the state."""
    program = make_program(mesh)
    state = program.first()
    while state.step < STEPS:
        state, _ = program.step(state, program.batch(state.step))
    return program.digest(state)


def way(group: object) -> str:
    if not hasattr(group, "shm"):
        return "alone"
    return "gloo" if group.shm is None else "shared memory"


if __name__ == "__main__":
    main()
