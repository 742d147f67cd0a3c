"""Works of gloo are asked without waiting for their lock."""

import sys

import pytest
import torch
import torch.distributed as dist

import funcshard as fs
from funcshard._utils.torch_groups import has_ended
from tests.ranks import run_ranks


def ask_until_they_end(mesh: fs.Mesh) -> int:
    """Ask works again and again, in a profiled step with hooks, and return how many have ended."""
    fs.init_mesh(mesh.shape, device="cpu")
    same = lambda tensor: tensor  # noqa: E731
    profiled = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    ended, every = 0, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # gloo's thread and this one take Python's lock in turns
    try:
        with profiled, torch.autograd.graph.saved_tensors_hooks(same, same):
            for _ in range(200):
                work = dist.all_reduce(torch.ones(3), async_op=True)
                while not has_ended(work):
                    pass
                ended += 1
    finally:
        sys.setswitchinterval(every)
    return ended


@pytest.mark.nightly
def test_a_profiled_work_that_ends_while_it_is_asked_does_not_hang() -> None:
    assert run_ranks(ask_until_they_end, 2, timeout=60) == [200, 200]
