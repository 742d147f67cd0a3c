"""The page that follows a step through the source tells the truth, and the walk stays short."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module
from tests.module.law import Runs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "funcshard"
PAGE = (ROOT / "docs" / "life-of-a-step.md").read_text()
WINGS = ("core", "module", "train")  # those above comm that take part in a step

MOST_FILES = {"Forward of one unit": 6, "Back through one unit": 5, "A training step": 15}


class Walk:
    """The files of the package that Python enters while it records, in order of first entry."""

    def __init__(self):
        self.files = []

    def start(self, *_):
        sys.setprofile(self._enter)

    def stop(self, *_):
        sys.setprofile(None)

    def _enter(self, frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            file = str(path.relative_to(PACKAGE))
            if file.partition("/")[0] in WINGS and file not in self.files:
                self.files.append(file)


def probed(net, x, walks):
    """Run four layers; the walks record the third one's forward, and the way back through it."""
    x = net.layers[1](net.layers[0](x))
    if walks:
        x.register_hook(walks["Back through one unit"].stop)
        walks["Forward of one unit"].start()
    x = net.layers[2](x)
    if walks:
        walks["Forward of one unit"].stop()
        x.register_hook(walks["Back through one unit"].start)
    return net.layers[3](x)


@pytest.fixture(scope="module")
def traced():
    """The files of each walk of rank 0 of two, after two steps in which the schedule is learned."""
    walks = {title: Walk() for title in MOST_FILES}
    net = Runs(probed, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))

    def main(mesh):
        plan, sharded, shards = of_module(mesh, net, ["layers.*"])
        optimizer = fs.torch_optimizer(torch.optim.AdamW)
        probe = {}

        def loss_fn(shards, buffers, x):
            return sharded(shards, buffers, x, probe).square().mean()

        step = fs.make_train_step(loss_fn, optimizer, plan, mesh, max_norm=1.0)
        state, x = step.init(shards, {}), torch.ones(2, 8)
        for _ in range(2):
            state, _ = step(state, x)
        probe = walks if mesh.rank == 0 else {}
        state, _ = step(state, x)
        probe = {}
        if mesh.rank == 0:
            walks["A training step"].start()
        step(state, x)
        walks["A training step"].stop()

    fs.simulate(main, 2)
    return {title: walk.files for title, walk in walks.items()}


def listed(title):
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("title", MOST_FILES)
def test_the_page_lists_the_files_that_a_real_step_enters(traced, title):
    assert listed(title) == traced[title]


@pytest.mark.parametrize(("title", "most"), MOST_FILES.items())
def test_the_walk_is_short(traced, title, most):
    assert 0 < len(traced[title]) <= most


def test_the_page_stays_short():
    assert len(PAGE.splitlines()) <= 100
