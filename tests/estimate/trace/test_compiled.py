"""What a compiler keeps for backward, and which kernels it fuses."""

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard.estimate import profile

ROWS, N = 64, 32
SIZE = ROWS * N * 4  # bytes of one activation


class Chain(nn.Module):
    """A product, then pointwise operations, then a product if there is a second weight."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(N, N, bias=False)
        self.w2 = nn.Linear(N, N, bias=False) if second else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(torch.sin(torch.exp(torch.sigmoid(self.w1(x)))))
        return x if self.w2 is None else self.w2(x)


def traced(block, compiled=(), blocks=1, **options):
    net = nn.Sequential(*(block() for _ in range(blocks)))
    apply, params, buffers = fs.make_functional(net)
    return profile(apply, params, buffers, torch.zeros(ROWS, N), compiled=compiled, loss=torch.sum, **options)


def moved(found):
    return sum(work.bytes for run in found._root().steps if hasattr(run, "work") for work in run.work)


CASES = {
    # Without a compiler autograd keeps the results of sigmoid, exp and tanh.
    "only the product's result": (lambda: Chain(False), 3 * SIZE, SIZE),
    # The second product reads the result of tanh, so it is written in any case.
    "what the second product reads": (lambda: Chain(True), 3 * SIZE, 2 * SIZE),
}


@pytest.mark.parametrize(("block", "eager", "compiled"), CASES.values(), ids=CASES)
def test_a_compiler_keeps_what_it_cannot_compute_again(block, eager, compiled):
    assert traced(block).saved == eager
    assert traced(block, ["0"]).saved == compiled


def test_fused_operations_move_fewer_bytes_but_compute_the_same():
    eager, compiled = traced(lambda: Chain(True)), traced(lambda: Chain(True), ["0"])
    assert moved(compiled) < 0.8 * moved(eager)
    assert compiled.forward_flops == eager.forward_flops


@pytest.mark.parametrize("fold", [True, False])
def test_equal_compiled_modules_fold_like_others(fold):
    one, four = traced(lambda: Chain(True), ["*"]), traced(lambda: Chain(True), ["*"], blocks=4, fold=fold)
    # A block's result is kept for the next block, whose product reads it.
    assert four.saved == 4 * one.saved + 3 * SIZE


def test_modules_that_are_not_named_are_not_compiled():
    saved = [traced(lambda: Chain(True), names, blocks=2).saved for names in (["*"], ["1"], [])]
    assert saved == [5 * SIZE, 6 * SIZE, 7 * SIZE]


def test_a_name_of_no_module_is_refused():
    with pytest.raises(ValueError, match="compiled module"):
        traced(lambda: Chain(False), ["nothing"])
