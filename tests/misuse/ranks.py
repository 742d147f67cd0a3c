"""Mistakes with ranks and meshes, and with sums over ranks."""

import torch

import funcshard as fs
from funcshard.testing import delayed, same_on_every_mesh
from tests.misuse import DESYNC, EVERYWHERE, GRID, set_up

ONE = torch.tensor(1.0)


def gather_plainly(shard, collectives):
    return collectives.all_gather(shard).wait


def grads_with(mesh, **functions):
    s = set_up(fs.with_collectives(mesh, "shard", **functions))
    return s.whole(s.grads())


def a_mean_in_place_of_the_sum(mesh):
    means = grads_with(mesh, reduce_scatter=lambda full, c: c.reduce_scatter(full / c.size).wait)
    torch.testing.assert_close(means, {name: grad / mesh.shard.size for name, grad in grads_with(mesh).items()})


def one_mesh_for_all(mesh):
    kept = []

    def main(inner):
        kept.append(inner)
        fs.psum(ONE, inner)
        return fs.psum(ONE, kept[0])

    return fs.simulate(main, 2)


def keys_in_another_order(mesh):
    sums = fs.psum(dict(sorted({"a": ONE * 0, "b": ONE}.items(), reverse=mesh.rank > 0)), mesh)
    torch.testing.assert_close(sums, {"a": ONE * 0, "b": ONE * 2})


CASES = [
    ("simulate", "world size before the function", TypeError("fn(mesh), before world_size"),
     lambda mesh: fs.simulate(2, lambda mesh: mesh.rank), EVERYWHERE),
    ("with_collectives", "other functions on one rank", DESYNC,
     lambda mesh: grads_with(mesh, all_gather=gather_plainly if mesh.rank else lambda shard, c:
        c.all_gather(shard.double()).wait)),
    ("with_collectives", "a mean in place of the sum", None, a_mean_in_place_of_the_sum),
    ("simulate Mesh", "one rank's mesh used by all", RuntimeError("the mesh of rank 0, and it is used by rank 1"),
     one_mesh_for_all),
    ("Mesh", "a reshaped mesh with the plan of the old shape", ValueError("make the plan with make_plan"),
     lambda s: fs.gather(s.shards, s.plan, s.mesh.reshaped({"shard": 4})), EVERYWHERE),
    ("Mesh", "reshaped to a number", TypeError('{"replicate": R, "shard": S}'), lambda mesh: mesh.reshaped(4)),
    ("Mesh", "reshaped on one rank only", DESYNC, lambda mesh: mesh.reshaped(GRID).shape if mesh.rank == 0 else None, (4,)),
    ("testing.delayed", "another kind", ValueError("all_to_all, broadcast; found 'gather': for several"),
     lambda mesh: delayed(mesh, "gather", 1.0)),
    ("testing.same_on_every_mesh", "ranks as text", ValueError("meshes must be a number of ranks, a shape such as"),
     lambda mesh: same_on_every_mesh(lambda mesh: 1, ["two"])),
    ("testing.same_on_every_mesh", "a negative tolerance", ValueError("tolerance must be a finite number, at least 0"),
     lambda mesh: same_on_every_mesh(lambda mesh: 1, [2], tolerance=-1.0)),
    ("axis_index", "an unknown axis", ValueError("found 'tensor'"), lambda mesh: fs.axis_index(mesh, axis="tensor")),
    ("psum_scatter all_to_all", "a size that is no multiple of the ranks", ValueError("one slice for each rank"),
     lambda mesh: fs.psum_scatter(torch.ones(5), mesh, tiled=True)),
    ("psum", "a truth value", TypeError("count with psum(x.int(), mesh)"),
     lambda mesh: fs.psum(torch.tensor(mesh.rank == 0), mesh), EVERYWHERE),
    ("psum", "keys in another order on a rank", None, keys_in_another_order),
]  # fmt: skip
for name in ("all_gather", "psum_scatter", "all_to_all", "pmax", "psum", "pmean"):
    CASES += [
        (name, "an axis that the mesh has not", ValueError("the mesh has 'replicate', 'shard'"),
         lambda mesh, name=name: getattr(fs, name)(torch.ones(mesh.world_size), mesh, axis="tensor")),
        (name, "the name of the axis in place of the mesh", TypeError("name the axis by keyword"),
         lambda mesh, name=name: getattr(fs, name)(ONE, "shard")),
        (name, "a number", TypeError("a tensor, or a tree of tensors; found float"),
         lambda mesh, name=name: getattr(fs, name)(1.0, mesh)),
    ]  # fmt: skip
