"""Classes of ``torch.optim`` update flat shards as they update the whole model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from funcshard.train.optimizers import apply_optimizer

O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, tuple[type[O.Optimizer], dict[str, Any]]] = {
    "SGD": (O.SGD, {"lr": 0.1}),
    "SGD momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD maximize": (O.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    "SGD fused": (O.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "SGD foreach": (O.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "Adam": (O.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "Adam amsgrad": (O.Adam, {"lr": 0.1, "amsgrad": True}),
    "Adam fused": (O.Adam, {"lr": 0.1, "fused": True}),
    "AdamW": (O.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "AdamW foreach": (O.AdamW, {"lr": 0.1, "foreach": True}),
    "AdamW fused": (O.AdamW, {"lr": 0.1, "fused": True}),
    "NAdam": (O.NAdam, {"lr": 0.1}),
    "NAdam foreach": (O.NAdam, {"lr": 0.1, "foreach": True}),
    "RAdam": (O.RAdam, {"lr": 0.1}),
    "Adamax": (O.Adamax, {"lr": 0.1}),
    "Adadelta": (O.Adadelta, {"lr": 0.5}),
    "Adagrad": (O.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "Adagrad foreach": (O.Adagrad, {"lr": 0.1, "foreach": True}),
    "Adagrad fused": (O.Adagrad, {"lr": 0.1, "fused": True}),
    "RMSprop": (O.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Rprop": (O.Rprop, {"lr": 0.1}),
    "ASGD": (O.ASGD, {"lr": 0.1, "t0": 2.0}),
    "ASGD foreach": (O.ASGD, {"lr": 0.1, "t0": 2.0, "foreach": True}),
}
WORLDS = [1, 3, {"replicate": 2, "shard": 2}]


def example(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(s, generator=generator) for name, s in {"a": (4, 3), "b": (3,), "e": (0,)}.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    return example(100 + step)


def on_the_whole(cls: type[O.Optimizer], options: dict, steps: int, schedule: Any = None) -> dict[str, torch.Tensor]:
    params = {name: torch.nn.Parameter(value) for name, value in example().items()}
    optimizer = cls(params.values(), **options)
    for step in range(steps):
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = schedule(step)
        for name, grad in gradients(step).items():
            params[name].grad = grad
        optimizer.step()
    return {name: value.detach() for name, value in params.items()}


def on_shards(optimizer: Any, steps: int, world: Any, strategy: str = "full_shard") -> list[dict[str, torch.Tensor]]:
    def main(mesh: fs.Mesh) -> dict[str, torch.Tensor]:
        plan = fs.make_plan(example(), mesh, units=["b"], strategy=strategy)
        shards = fs.shard(example(), plan, mesh)
        state = optimizer[0](shards)
        for step in range(steps):
            shards, state = apply_optimizer(optimizer, fs.shard(gradients(step), plan, mesh), state, shards)
        return fs.gather(shards, plan, mesh)

    return fs.simulate(main, world)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    # A kernel takes vector or scalar instructions depending on the index of an element, and their
    # last bits differ.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_five_steps_on_shards_are_five_steps_on_the_whole(cls: Any, options: dict, world: Any) -> None:
    expected = on_the_whole(cls, options, 5)
    assert not torch.equal(expected["a"], example()["a"])
    for params in on_shards(fs.torch_optimizer(cls, **options), 5, world):
        assert_equal(params, expected)


@pytest.mark.parametrize("cls", [O.SGD, O.AdamW, O.NAdam, O.ASGD])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_an_option_may_be_a_schedule(cls: Any, strategy: str) -> None:
    def schedule(step: int) -> float:
        return 0.1 / (1 + step)

    expected = on_the_whole(cls, {"lr": 0.1}, 4, schedule)
    assert not torch.allclose(expected["a"], on_the_whole(cls, {"lr": 0.1}, 4)["a"])
    for params in on_shards(fs.torch_optimizer(cls, lr=schedule), 4, 2, strategy):
        assert_equal(params, expected)


class SignSGD(O.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize(
    ("cls", "options", "remedy"),
    [
        (O.LBFGS, {}, "choose one of these; elementwise=True would compute something else on shards"),
        (O.Adafactor, {}, "choose one of these"),
        (O.SparseAdam, {}, "choose one of these"),
        (O.Muon, {}, r"call fs\.muon\(plan, mesh, lr=\.\.\.\)"),
        (O.SGD, {"elementwise": False}, ""),
        (SignSGD, {}, "pass elementwise=True if it is one too"),
    ],
)
def test_an_optimizer_that_is_not_elementwise_is_refused(cls: type[O.Optimizer], options: dict, remedy: str) -> None:
    words = (
        rf"torch_optimizer takes an optimizer that updates each element by itself, because it works on flat shards; found "
        rf"'{cls.__name__}', known are .*AdamW.*: {remedy}"
    )
    with pytest.raises(ValueError, match=words):
        fs.torch_optimizer(cls, lr=0.1, **options)


def test_elementwise_vouches_for_a_class() -> None:
    optimizer = fs.torch_optimizer(SignSGD, elementwise=True, lr=0.5)
    params, grads = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, -2.0])}
    assert optimizer.step(grads, optimizer.init(params), params)[0]["w"].tolist() == [-0.5, 0.5]


def optax_sgd(lr: float) -> tuple[Callable, Callable]:
    def update(grads: Any, state: int, params: Any = None) -> tuple[Any, int]:
        return tree.map(lambda g: -lr * g, grads), state + 1

    return lambda params: 0, update


def keyword_only(lr: float) -> tuple[Callable, Callable]:
    def update(grads: Any, state: Any, *, params: Any = None, inplace: bool = True) -> tuple[Any, Any]:
        assert not inplace  # updating in place would donate the arguments
        return tree.map(lambda g, p: -lr * g + 0 * p, grads, params), state

    return lambda params: None, update


@pytest.mark.parametrize("make", [optax_sgd, keyword_only], ids=["optax", "TorchOpt"])
def test_pairs_of_functions_are_called_as_they_are_written(make: Any) -> None:
    expected = on_the_whole(O.SGD, {"lr": 0.1}, 3)
    for params in on_shards(make(0.1), 3, 2):
        assert_equal(params, expected)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adam"])
def test_torchopt_on_shards_is_torchopt_on_the_whole(name: str) -> None:
    torchopt = pytest.importorskip("torchopt", reason="an optional dependency of the tests")
    optimizer = getattr(torchopt, name)(0.1, **{"sgd": {"momentum": 0.9}, "adamw": {"weight_decay": 0.1}, "adam": {}}[name])
    whole, state = example(), optimizer.init(example())
    for step in range(5):
        updates, state = optimizer.update(gradients(step), state, params=whole, inplace=False)
        whole = torchopt.apply_updates(whole, updates, inplace=False)
    for params in on_shards(optimizer, 5, 2):
        assert_equal(params, whole)
    # TorchOpt's Adam corrects the bias in single precision, torch.optim's in double.
    if name == "sgd":
        assert_equal(whole, on_the_whole(O.SGD, {"lr": 0.1, "momentum": 0.9}, 5))


class _Eager(torch.optim.SGD):
    """A class that makes its state when it is made, as Adagrad of older releases does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"sum": torch.full_like(p, 0.5)}

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    total = self.state[p]["sum"].add_(p.grad.square())
                    p.sub_(group["lr"] * p.grad / total.sqrt())


def test_a_class_may_make_its_state_before_the_first_step():
    optimizer = fs.torch_optimizer(_Eager, elementwise=True, lr=0.2)
    shards, grads = {"": {"float32": torch.ones(3)}}, {"": {"float32": torch.tensor([1.0, 2.0, 3.0])}}
    whole = torch.nn.Parameter(torch.ones(3))
    theirs, state = _Eager([whole], lr=0.2), optimizer.init(shards)
    for _ in range(3):
        whole.grad = grads[""]["float32"].clone()
        theirs.step()
        shards, state = optimizer.step(grads, state, shards)
        assert torch.equal(shards[""]["float32"], whole.detach())
