"""A simulated mesh is for its rank, while the simulation runs."""

from __future__ import annotations

import pytest
import torch

import funcshard as fs
from tests.ranks import run_simulated


def test_a_simulated_mesh_serves_its_own_rank_while_the_simulation_runs() -> None:
    def use_the_others(mesh: fs.Mesh) -> None:
        meshes[mesh.rank] = mesh
        fs.psum(torch.ones(1), mesh)
        fs.psum(torch.ones(1), meshes[1 - mesh.rank])

    meshes: dict[int, fs.Mesh] = {}
    with pytest.raises(RuntimeError, match=r"found the mesh of rank \d, and it is used by rank \d"):
        run_simulated(use_the_others, 2)
    with pytest.raises(RuntimeError, match="found the mesh of rank 0, and the simulation of rank 0 has ended"):
        fs.psum(torch.ones(1), meshes[0])
