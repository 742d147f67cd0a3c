"""Mistakes with ranks and meshes, and with sums over ranks."""

import threading

import torch

import funcshard as fs
from funcshard.testing import delayed, same_on_every_mesh
from tests.misuse import BUFFERS, DESYNC, EVERYWHERE, GRID, Table, right, set_up, untold, whole_grads, whole_loss

CASES = Table()
MISTAKES = "docs/mistakes.md"
ONE = torch.tensor(1.0)

# --- simulate -------------------------------------------------------------------------------------

CASES += [
    ("simulate", "world size before the function", TypeError("fn(mesh), before world_size"),
     lambda mesh: fs.simulate(2, lambda mesh: mesh.rank), EVERYWHERE),
]  # fmt: skip


# --- with_collectives -----------------------------------------------------------------------------


def gather_plainly(shard, collectives):
    return collectives.all_gather(shard).wait


def grads_with(mesh, axis="shard", **functions):
    s = set_up(fs.with_collectives(mesh, axis, **functions))
    return s.whole(s.grads())


CASES += [
    ("with_collectives", "other functions on one rank", DESYNC,
     lambda mesh: grads_with(mesh, all_gather=gather_plainly if mesh.rank else lambda shard, c:
        c.all_gather(shard.double()).wait)),
    ("with_collectives", "a mean in place of the sum",
     untold("docs/precision.md",
        "Backward takes your `reduce_scatter` for the adjoint of your `all_gather`, and differentiates neither.",
        whole_grads), lambda mesh: grads_with(mesh, reduce_scatter=lambda full, c: c.reduce_scatter(full / c.size).wait),
     (2, 4)),
]  # fmt: skip


@CASES("simulate Mesh", "one rank's mesh used by all", RuntimeError("the mesh of rank 0, and it is used by rank 1"))
def _(mesh):
    kept = []

    def main(inner):
        kept.append(inner)
        fs.psum(ONE, inner)
        return fs.psum(ONE, kept[0])

    return fs.simulate(main, 2)


@CASES("simulate", "a thread of the rank communicates", right(whole_grads))
def _(mesh):
    s, found = set_up(mesh), []
    thread = threading.Thread(target=lambda: found.append(s.grads()))
    thread.start()
    thread.join()
    return s.whole(found[0])


def shared_sum():
    shared = torch.zeros(2)
    fs.simulate(lambda inner: shared.add_(1), 2)
    return shared


CASES += [
    ("simulate", "ranks write to one tensor that they share",
     untold(MISTAKES, "Simulated ranks share one process, so they also share a tensor of an enclosing scope.",
        torch.ones(2)), lambda mesh: shared_sum()),
]  # fmt: skip


# --- Mesh, init_mesh, delayed ---------------------------------------------------------------------

CASES += [
    ("Mesh", "reshaped to a number", TypeError('{"replicate": R, "shard": S}'), lambda mesh: mesh.reshaped(4)),
    ("Mesh", "reshaped on one rank only", DESYNC, lambda mesh: mesh.reshaped(GRID).shape if mesh.rank == 0 else None, (4,)),
    ("make_plan simulate init_mesh", "a typo in the name of the shard axis",
     untold(MISTAKES, "is a model axis, and nothing is sharded", True),
     lambda mesh: fs.make_plan({"w": torch.ones(12)}, {"shards": mesh.world_size}).unit_list[0].buffers[0].shards > 1),
    ("testing.delayed", "another kind", ValueError("all_to_all, broadcast; found 'gather': for several"),
     lambda mesh: delayed(mesh, "gather", 1.0)),
    ("testing.delayed", "a negative time", ValueError("seconds must be a finite number, at least 0; found -1.0: pass 0.0"),
     lambda mesh: delayed(mesh, "all_gather", -1.0)),
    ("testing.same_on_every_mesh", "ranks as text", ValueError("meshes must be a number of ranks, a shape such as"),
     lambda mesh: same_on_every_mesh(lambda mesh: 1, ["two"])),
    ("testing.same_on_every_mesh", "a negative tolerance", ValueError("tolerance must be a finite number, at least 0"),
     lambda mesh: same_on_every_mesh(lambda mesh: 1, [2], tolerance=-1.0)),
]  # fmt: skip


@CASES("Mesh", "a reshaped mesh with the plan of the old shape", ValueError("make the plan with make_plan"), (4, GRID))
def _(mesh):
    s = set_up(mesh)
    other = mesh.reshaped({"shard": 4} if mesh.replicate.size > 1 else GRID)
    return fs.gather(s.shards, s.plan, other)


@CASES("Mesh shard", "shards of one shape of the mesh under another", ValueError("for another number of ranks"), (4, GRID))
def _(mesh):
    other = mesh.reshaped({"shard": 4} if mesh.replicate.size > 1 else GRID)
    return set_up(other).loss(set_up(mesh).shards, torch.ones(2, 4))


# --- psum, pmean ----------------------------------------------------------------------------------

for name in ("all_gather", "psum_scatter", "all_to_all", "pmax", "psum", "pmean"):
    CASES += [
        (name, "an axis that the mesh has not", ValueError("the mesh has 'replicate', 'shard'"),
         lambda mesh, name=name: getattr(fs, name)(torch.ones(mesh.world_size), mesh, axis="tensor")),
        (name, "the name of the axis in place of the mesh", TypeError("name the axis by keyword"),
         lambda mesh, name=name: getattr(fs, name)(ONE, "shard")),
        (name, "a number", TypeError("a tensor, or a tree of tensors; found float"),
         lambda mesh, name=name: getattr(fs, name)(1.0, mesh)),
    ]  # fmt: skip
CASES += [
    ("axis_index", "an unknown axis", ValueError("found 'tensor'"), lambda mesh: fs.axis_index(mesh, axis="tensor")),
    ("psum_scatter all_to_all", "a size that is no multiple of the ranks", ValueError("one slice for each rank"),
     lambda mesh: fs.psum_scatter(torch.ones(5), mesh, tiled=True)),
    ("psum", "a truth value", TypeError("count with psum(x.int(), mesh)"),
     lambda mesh: fs.psum(torch.tensor(mesh.rank == 0), mesh), EVERYWHERE),
    ("psum", "keys in another order on a rank", right(lambda: {"a": torch.tensor(0.0), "b": torch.tensor(2.0)}),
     lambda mesh: fs.psum(dict(sorted({"a": ONE * 0, "b": ONE}.items(), reverse=mesh.rank > 0)), mesh),
     (2, {"replicate": 2, "shard": 1})),
    ("psum", "a list in another order on a rank",
     untold(MISTAKES, "`psum` adds the tensors of a list by position, because they have no names.", lambda:
        [torch.tensor(0.0), torch.tensor(2.0)]), lambda mesh: fs.psum([ONE, ONE * 0] if mesh.rank else [ONE * 0, ONE], mesh),
     (2,)),
    ("psum", "a small integer dtype",
     untold(MISTAKES, "A sum has the dtype of its terms, as in torch, so small integers wrap around.", 400),
     lambda mesh: fs.psum(torch.tensor(200, dtype=torch.uint8), mesh).item(), (2,)),
    ("psum", "twice",
     untold("docs/gradients.md", "A replicated value that goes through `psum` again becomes W times too large.",
        torch.tensor(2.0)), lambda mesh: fs.psum(fs.psum(ONE, mesh), mesh), (2,)),
    ("pmean psum", "over a world of one rank by mistake",
     untold(MISTAKES, "`fs.Mesh()` is a world of one rank, so a collective over it returns this rank's numbers.",
        whole_loss),
     lambda mesh: fs.pmean((s := set_up(mesh)).loss(s.shards, s.x), fs.Mesh()).detach()),
    ("pmean", "the loss is a mean over the world already", right(whole_grads),
     lambda s: s.whole(fs.value_and_grad(lambda shards, x: fs.pmean(s.loss(shards, x), s.mesh))(s.shards, s.x)[1])),
    ("psum", "the loss is summed over the world",
     untold("docs/gradients.md", "A loss function that returns `psum(loss)` makes the loss and its gradient W times larger.",
        whole_grads),
     lambda s: s.whole(fs.value_and_grad(lambda shards, x: fs.psum(s.loss(shards, x), s.mesh))(s.shards, s.x)[1])),
    ("pmean", "gradients that are averaged already",
     untold("docs/gradients.md", "A scalar on W ranks can mean two things, and nothing in its type says which:",
        whole_grads),
     lambda s: s.whole(fs.pmean(s.grads(), s.mesh))),
]  # fmt: skip


# --- the log of collectives -----------------------------------------------------------------------


@CASES("record_events Event", "one block inside another", right((2, 1)))
def _(mesh):
    with fs.record_events() as outer:
        fs.psum(ONE, mesh.reshaped({"shard": mesh.world_size}))
        with fs.record_events() as inner:
            fs.psum(ONE, mesh.reshaped({"shard": mesh.world_size}))
    return len(outer), len(inner)


@CASES("record_events", "without a with block", TypeError("not iterable"))
def _(mesh):
    events = fs.record_events()
    fs.psum(ONE, mesh)
    return list(events)


def events_of_thread(mesh):
    with fs.record_events() as events:
        thread = threading.Thread(target=lambda: fs.psum(ONE, mesh))
        thread.start()
        thread.join()
    return len(events)


CASES += [
    ("record_events", "a thread of the block communicates",
     untold(MISTAKES, "`record_events` doesn't record a thread that you start inside its block.", 1),
     events_of_thread, (2, 4)),
]  # fmt: skip


@CASES("simulate fully_shard", "one rank's sharded function used by all", RuntimeError("it is used by rank 1"), EVERYWHERE)
def _(mesh):
    kept = []

    def main(inner):
        s = set_up(inner)
        if inner.rank == 0:
            kept.append(s.sharded)
        fs.psum(ONE, inner)
        return kept[0](s.shards, BUFFERS, s.x)

    return fs.simulate(main, 2)
