"""Random numbers in blocks: the same values on every mesh, and a rank draws only what it keeps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import funcshard as fs
from funcshard.core import leaf_blocks
from funcshard.module import block_draws
from tests.module.law import same_bits
from tests.module.test_init import MODULES, on_meta
from tests.ranks import on_ranks

WORLDS = [3, {"replicate": 2, "shard": 2}]
SMALL = 7  # elements of a block, so that leaves have several blocks and shards cut them


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_blocks, "BLOCK", SMALL)


def initialised(
    net: nn.Module, mesh: fs.Mesh, units: Any = (), draws: str = "blocks", **options: Any
) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    plan = fs.make_plan(fs.make_functional(net)[1], mesh, units=units, **options)
    return fs.to_state_dict(fs.init_module(net, plan, mesh, draws=draws)[0], plan, mesh)


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("case", MODULES)
@on_ranks()
def test_every_mesh_gets_the_values_of_one_rank(mesh: fs.Mesh, case: str, world: Any) -> None:
    build, units = MODULES[case]
    net = on_meta(build)
    alone = initialised(net, fs.Mesh())
    same_bits(initialised(net, mesh, units), alone)
    assert all(value.isfinite().all() for value in alone.values())


def test_each_block_has_the_generator_of_its_number() -> None:
    found = initialised(on_meta(lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))), fs.Mesh(), ["0"])
    torch.manual_seed(7)
    number = int(torch.randint(2**62, ()))
    for name, inputs in (("0.weight", 5), ("0.bias", 5), ("1.weight", 4), ("1.bias", 4)):
        expected = torch.zeros_like(found[name])
        for block in expected.view(-1).split(SMALL):
            block.uniform_(-(inputs**-0.5), inputs**-0.5, generator=torch.Generator().manual_seed(number))
            number += 1
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=0)


class Written(nn.Module):
    """A module with one parameter, which a function writes."""

    def __init__(self, write: Callable[[nn.Parameter], object], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=dtype.is_floating_point)
        self.write = write

    def reset_parameters(self) -> None:
        self.write(self.w)


def scaled(w: torch.Tensor) -> None:
    w.uniform_(0.5, 2).log_().neg_().mul_(3).add_(0.5).sub_(1).div_(2).clamp_(min=-1).clamp_(max=1).tanh_().abs_().sqrt_()


def second_half(w: torch.Tensor) -> None:
    w.data.normal_()
    w.data[3:] = w.data[:3] + 1


def through_float(w: torch.Tensor) -> None:  # as in models of Hugging Face
    w.data = nn.init.trunc_normal_(w.data.to(torch.float64), std=0.02).to(w.dtype)


def assigned(w: torch.Tensor) -> None:
    w.data = torch.randn(w.shape)


# name -> how a reset writes, and whether the parameter is made whole on each rank.
WRITES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "normal": (nn.init.normal_, False),
    "kaiming": (lambda w: nn.init.kaiming_uniform_(w, a=5**0.5), False),
    "through data": (lambda w: w.data.normal_(0.0, 0.02), False),
    "a chain": (scaled, False),
    "exponential": (lambda w: w.exponential_(2.0), False),
    "random": (lambda w: w.random_(3, 9), False),
    "overwritten": (lambda w: (w.normal_(), w.fill_(3.0), w.uniform_()), False),
    "powers": (lambda w: w.uniform_().pow_(2).exp_().sigmoid_().erfinv_(), False),
    "a constant": (lambda w: nn.init.constant_(w, 2.5), False),
    # Newer releases draw until all values lie inside; older ones compute element by element.
    "truncated": (lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.03, b=0.05), torch.__version__ >= "2.12"),
    "orthogonal": (nn.init.orthogonal_, True),
    "a row of zeros": (lambda w: (w.normal_(), w[2].zero_()), True),
    "a half from the other": (second_half, True),
    "copied": (lambda w: w.copy_(torch.arange(w.numel()).view(w.shape)), True),
    "its own generator": (lambda w: w.normal_(generator=torch.Generator().manual_seed(5)), True),
    "through float64": (through_float, True),
    "assigned data": (assigned, True),
    "a list of tensors": (lambda w: torch._foreach_zero_([w]), True),
}
NO_RANDOM_NUMBERS = ("a constant", "copied", "its own generator", "a list of tensors")


@pytest.mark.slow
@pytest.mark.parametrize("case", WRITES)
def test_a_parameter_is_written_alike_on_every_mesh(case: str) -> None:
    write, made_whole = WRITES[case]
    whole = []

    def watched(w: torch.Tensor) -> None:
        write(w)
        values = block_draws.drawn_values(w)
        assert values is not None
        whole.append(values.whole is not None)

    net = on_meta(lambda: Written(watched, (6, 5), torch.float32))
    alone = initialised(net, fs.Mesh())
    for found in fs.simulate(lambda mesh: initialised(net, mesh), 3):
        same_bits(found, alone)
    assert whole == [made_whole] * 4
    assert alone["w"].isfinite().all()
    if case in NO_RANDOM_NUMBERS:
        plain = on_meta(lambda: Written(write, (6, 5), torch.float32))
        same_bits(alone, initialised(plain, fs.Mesh(), draws="whole"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64], ids=str)
@on_ranks(2)
def test_leaves_of_any_dtype_and_on_the_host_are_drawn(mesh: fs.Mesh, dtype: torch.dtype) -> None:
    write = (lambda w: w.random_(100)) if dtype == torch.int64 else nn.init.normal_
    net = on_meta(lambda: Written(write, (23,), dtype))
    alone = initialised(net, fs.Mesh())
    assert alone["w"].dtype == dtype
    assert len({str(each) for each in alone["w"].tolist()}) > 15
    same_bits(initialised(net, mesh, offload=True), alone)


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks({"shard": 2, "tensor": 2})
def test_slices_of_a_larger_tensor_are_those_of_the_whole(mesh: fs.Mesh, dim: int) -> None:
    whole = initialised(on_meta(lambda: nn.Linear(6, 8, bias=False)), fs.Mesh())
    slices = on_meta(lambda: nn.Linear(*((6, 4) if dim == 0 else (3, 8)), bias=False))
    same_bits(initialised(slices, mesh, local={"weight": {"tensor": dim}}), whole)


class Counted(TorchDispatchMode):
    """The number of elements that ``normal_`` drew."""

    drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.normal_.default and type(args[0]) is torch.Tensor:
            self.drawn += args[0].numel()
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("world", "extra"), [(1, 0), (4, 4 * 2 * SMALL)])  # both ends of a shard may cut a block
@on_ranks()
def test_a_rank_draws_the_blocks_that_its_shards_touch(mesh: fs.Mesh, world: int, extra: int) -> None:
    net = on_meta(lambda: nn.Sequential(*[Written(nn.init.normal_, (50, 10), torch.float32) for _ in range(4)]))
    with Counted() as counted:
        initialised(net, mesh, ["*"])
    assert 0 <= counted.drawn - 2_000 / world <= extra


def test_an_operation_that_fails_names_the_parameter() -> None:
    net = on_meta(lambda: Written(lambda w: w.normal_(0.0, -1.0), (3,), torch.float32))
    with pytest.raises(RuntimeError, match=r"std >= 0\.0") as caught:
        initialised(net, fs.Mesh())
    assert any("while parameter 'w' was drawn in blocks" in note for note in caught.value.__notes__)
