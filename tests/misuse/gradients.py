"""Mistakes with losses, gradients and their norms."""

import torch

import funcshard as fs
from tests.misuse import BUFFERS, DATA, DESYNC, EVERYWHERE, PARAMS


def per_sample(s, x=None, **options):
    evaluate = fs.per_sample_grad(lambda shards, x: s.sharded(shards, BUFFERS, x).square().sum(), s.plan, s.mesh, **options)
    return s.whole(evaluate(s.shards, s.x if x is None else x)[1])


CASES = [
    ("value_and_grad", "on_reduce_scattered communicates on one rank", DESYNC,
     lambda s: fs.value_and_grad(
        s.loss, on_reduce_scattered=lambda *_: None if s.mesh.rank else fs.psum(DATA, s.mesh) and None)(s.shards, s.x)),
    ("value_and_grad", "a weight with a gradient", ValueError("return weight.detach()"),
     lambda s: fs.value_and_grad(lambda *args: (s.loss(*args),) * 2, weighted=True)(s.shards, s.x)),
    ("value_and_grad", "weights on one rank only", DESYNC,
     lambda s: (fs.value_and_grad((lambda shards, x: (s.loss(shards, x), 1.0)) if s.mesh.rank else s.loss,
        weighted=s.mesh.rank > 0)(s.shards, s.x) and s.whole(s.shards))),
    ("per_sample_grad", "no batch", TypeError("the batch as its last positional argument"),
     lambda s: fs.per_sample_grad(s.loss, s.plan, s.mesh)(s.shards, batch=s.x)),
    ("per_sample_grad", "noise without a bound", ValueError("one sample's part is unbounded; pass max_norm"),
     lambda s: per_sample(s, noise_multiplier=1.0)),
    ("per_sample_grad", "noise without a generator", ValueError("noise needs a generator"),
     lambda s: per_sample(s, max_norm=1.0, noise_multiplier=1.0)),
    ("per_sample_grad", "a generator of each rank's own", ValueError("the state of the generator of randn_like"),
     lambda s: per_sample(s, max_norm=1.0, noise_multiplier=1.0, generator=torch.Generator().manual_seed(s.mesh.rank)),
     EVERYWHERE),
    ("per_sample_grad", "a batch with a number in it", ValueError("pass what all samples share before the batch"),
     lambda s: per_sample(s, x={"x": s.x, "scale": 1.0})),
    ("vdot", "whole parameters", ValueError("these are whole parameters"),
     lambda s: fs.vdot(PARAMS, PARAMS, s.plan, s.mesh)),
    ("axpy", "trees of two plans", ValueError("two trees with the same keys"),
     lambda s: fs.axpy(1.0, s.shards, fs.shard(PARAMS, fs.make_plan(PARAMS, s.mesh), s.mesh))),
    ("randn_like", "a generator of each rank's own", ValueError("the state of the generator of randn_like"),
     lambda s: fs.randn_like(s.shards, s.plan, s.mesh, generator=torch.Generator().manual_seed(s.mesh.rank)), EVERYWHERE),
    ("broadcast_to_shards", "the plan of another mesh", ValueError("mesh"),
     lambda s: fs.broadcast_to_shards(torch.tensor(0.1), fs.make_plan(PARAMS, 8), s.mesh)),
    ("linalg.cg", "a plan without a mesh", ValueError("shards need both a plan and a mesh"),
     lambda s: fs.linalg.cg(lambda v: v, s.shards, s.plan)),
    ("linalg.eigsh", "a first vector of zeros", ValueError("v0 must be a vector…found the norm 0.0"),
     lambda s: fs.linalg.eigsh(lambda v: v, fs.axpy(-1.0, s.shards, s.shards), s.plan, s.mesh)),
    ("linalg.eigsh", "an operator that gives NaN", ValueError("a product with A has values that are not finite"),
     lambda s: fs.linalg.eigsh(lambda v: fs.axpy(float("nan"), v, v), s.shards, s.plan, s.mesh)),
]  # fmt: skip
