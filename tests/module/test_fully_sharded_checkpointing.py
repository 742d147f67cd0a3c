"""Checkpoints around, inside and across units: the same bits, less memory, predicted all-gathers."""

from __future__ import annotations

import functools

import optree
import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.ranks import run_simulated
from tests.storages import Log

WIDTH, BLOCKS = 6, 4
NAMES = [f"blocks.{i}" for i in range(BLOCKS)]


class Block(nn.Module):
    """An MLP with dropout; ``how`` names the part that backward computes again."""

    def __init__(self, how, log):
        super().__init__()
        self.how, self.log = how, log
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.5)

    def wide(self, x):
        y = torch.tanh(self.up(x))
        self.log(y)
        self.log.most = max(self.log.most, self.log.alive())
        return y

    def waves(self, x):
        return self.wide(x).cos()

    def inner(self, x):
        return x + torch.tanh(self.dropout(self.down(self.wide(x))))

    def forward(self, x):
        if self.how == "all inside":
            return checkpoint(self.inner, x, use_reentrant=False)
        if self.how == "half inside":
            return x + torch.tanh(self.dropout(self.down(checkpoint(self.waves, x, use_reentrant=False))))
        return self.inner(x) if self.how != "nothing, half" else x + torch.tanh(self.dropout(self.down(self.waves(x))))


class Stack(nn.Module):
    def __init__(self, how, log=None):
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(WIDTH))
        log = Log() if log is None else log
        log.most = 0
        self.blocks = nn.ModuleList(Block(how, log) for _ in range(BLOCKS))

    def forward(self, x):
        x = x * self.scale
        if self.how == "pairs":
            for i in range(0, BLOCKS, 2):
                first, second = self.blocks[i], self.blocks[i + 1]
                x = checkpoint(lambda x, a=first, b=second: b(a(x)), x, use_reentrant=False)
        else:
            around = functools.partial(checkpoint, use_reentrant=False) if self.how == "around" else lambda f, x: f(x)
            for block in self.blocks:
                x = around(block, x)
        return x.square().mean()


# Part that backward computes again -> (options of predict_events, the way that computes the same
# without checkpoints).
WAYS = {
    "nothing": ({}, None),
    "remat": ({"recomputed": NAMES}, "nothing"),
    "around": ({"recomputed": NAMES}, "nothing"),
    "pairs": ({"recomputed": [tuple(NAMES[:2]), tuple(NAMES[2:])]}, "nothing"),
    "all inside": ({"recomputed": NAMES, "not_saved": NAMES}, "nothing"),
    "half inside": ({"recomputed": NAMES}, "nothing, half"),
}


def step(mesh, how, strategy, backward_prefetch="pre", precision=None):
    """Return loss and gradient, events, predicted events, and the most activations alive at a time."""
    log = Log()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        apply, params, buffers = fs.make_functional(Stack(how, log))
    plan = fs.make_plan(params, mesh, units=["blocks.*"], strategy=strategy, precision=precision)
    schedule = fs.make_schedule(plan, backward_prefetch=backward_prefetch)
    sharded = fs.fully_shard(apply, plan, mesh, schedule=schedule, remat=NAMES if how == "remat" else ())
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (1 + mesh.rank)
    with fs.record_events() as events:
        loss, grads = fs.value_and_grad(lambda s: sharded(s, buffers, x))(fs.shard(params, plan, mesh))
    assert log.alive() == 0
    return (loss, grads), tuple(events), fs.predict_events(plan, schedule, **WAYS.get(how, ({},))[0]), log.most


def same_bits(found, expected):
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), found, expected)


@functools.cache
def expected(how, strategy):
    return [result[0] for result in run_simulated(step, 2, how, strategy)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "backward_prefetch"),
    [("full_shard", "pre"), ("full_shard", "post"), ("full_shard", None), ("shard_grad_op", "pre"), ("no_shard", "post")],
)
@pytest.mark.parametrize("how", [how for how in WAYS if how != "nothing"])
def test_the_bits_are_the_same_the_memory_is_less_and_the_gathers_are_predicted(how, strategy, backward_prefetch):
    without = expected(WAYS[how][1], strategy)
    for (found, events, predicted, most), wanted in zip(
        run_simulated(step, 2, how, strategy, backward_prefetch), without, strict=True
    ):
        same_bits(found, wanted)
        assert events == predicted
        assert most == (2 if how == "pairs" else 1)


def test_without_checkpoints_every_activation_is_alive_until_backward():
    assert [most for *_, most in run_simulated(step, 2, "nothing", "full_shard")] == [BLOCKS] * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["remat", "around", "all inside"])
def test_a_unit_that_is_computed_again_costs_no_gather_that_resharding_does_not(how):
    names = {"full_shard": 2, "shard_grad_op": 1, "no_shard": 0}  # a shard_grad_op unit stays gathered
    for strategy, times in names.items():
        _, events, *_ = run_simulated(step, 2, how, strategy)[0]
        gathered = [event.unit for event in events if event.kind == "all_gather"]
        assert [gathered.count(name) for name in NAMES] == [times] * BLOCKS


def later_steps(mesh, how, strategy, backward_prefetch):
    """Return the events of three steps, and the predicted ones."""
    apply, params, buffers = fs.make_functional(Stack(how))
    plan = fs.make_plan(params, mesh, units=["blocks.*"], strategy=strategy)
    schedule = fs.make_schedule(plan, backward_prefetch=backward_prefetch)
    sharded, found = fs.fully_shard(apply, plan, mesh, schedule=schedule), []
    for _ in range(3):
        with fs.record_events() as events:
            fs.value_and_grad(lambda s: sharded(s, buffers, torch.ones(4, WIDTH)))(fs.shard(params, plan, mesh))
        found.append((tuple(events), fs.predict_events(plan, sharded.schedule, recomputed=NAMES)))
    return found


@pytest.mark.parametrize("backward_prefetch", ["pre", "post", None])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_units_with_all_inside_a_checkpoint_are_gathered_ahead_once_a_backward_has_reached_them(strategy, backward_prefetch):
    inside, around = (run_simulated(later_steps, 2, how, strategy, backward_prefetch)[0] for how in ("all inside", "around"))
    assert all(events == predicted for events, predicted in (*inside, *around))
    assert inside[1:] == around[1:]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["remat", "around", "all inside"])
def test_mixed_precision_is_the_same_the_second_time(how):
    precision = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = (run_simulated(step, 2, each, "full_shard", "pre", precision) for each in (how, "nothing"))
    for (found, events, predicted, _), (wanted, *_) in zip(*results, strict=True):
        same_bits(found, wanted)
        assert events == predicted


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2], ids=str)
def test_parameters_of_the_root_inside_a_checkpoint_are_gathered_again(world):
    class Root(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.again, self.block, self.scale = again, nn.Linear(3, 3), nn.Parameter(torch.linspace(1, 2, 3))

        def tail(self, x):
            return torch.tanh(self.block(x).exp() * self.scale) * self.scale

        def forward(self, x):
            x = x * self.scale
            return (checkpoint(self.tail, x, use_reentrant=False) if self.again else self.tail(x)).sum()

    def main(mesh, again):
        torch.manual_seed(0)
        apply, params, buffers = fs.make_functional(Root(again))
        plan = fs.make_plan(params, mesh, units=["block"])
        sharded = fs.fully_shard(apply, plan, mesh)
        with fs.record_events() as events:
            found = fs.value_and_grad(sharded)(fs.shard(params, plan, mesh), buffers, torch.ones(2, 3))
        return found, [event.unit for event in events if event.kind == "all_gather"]

    for (found, gathered), (wanted, before) in zip(
        *(fs.simulate(lambda mesh, again=again: main(mesh, again), world) for again in (True, False)), strict=True
    ):
        same_bits(found, wanted)
        assert sorted(set(gathered)) == sorted(set(before))


def test_statistics_are_those_of_one_forward_though_it_runs_twice():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return checkpoint(self.norm, x, use_reentrant=False).square().sum()

    apply, params, buffers = fs.make_functional(Normed(), mutable=True)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    loss, new = apply(leaves, buffers, torch.arange(12.0).view(4, 3))
    before = {name: buffer.clone() for name, buffer in new.items()}
    loss.backward()
    same_bits(new, before)
    assert new["norm.num_batches_tracked"] == 1


def test_reentrant_checkpoints_are_refused_by_torch_with_its_own_words():
    def loss(shards, x):
        return checkpoint(lambda x: (shards["w"] * x).sum(), x * shards["w"], use_reentrant=True)

    with pytest.raises(RuntimeError, match=r"use_reentrant=True.* is incompatible with \.grad\(\).*use_reentrant=False"):
        fs.value_and_grad(loss)({"w": torch.ones(3)}, torch.ones(3))


# --- Hugging Face -------------------------------------------------------------------------------------------------------

LLAMA = {
    "vocab_size": 17,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "attention_dropout": 0.3,
}
GPT2 = {"vocab_size": 17, "n_positions": 16, "n_embd": 8, "n_layer": 3, "n_head": 2}
BERT = {
    "vocab_size": 17,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, LLAMA, "model.layers"),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2, "transformer.h"),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig, BERT, "bert.encoder.layer"),
}


def hugging(mesh, name, again):
    cls, config, options, layers = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = cls(config(**options)).train()
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    units = [f"{layers}.{i}" for i in range(3)]
    apply, params, buffers = fs.make_functional(model)
    plan = fs.make_plan(params, mesh, units=units)
    sharded = fs.fully_shard(apply, plan, mesh)
    tokens = torch.arange(12).view(2, 6) + mesh.rank
    kept = Log()

    def pack(tensor):
        kept(tensor)
        return tensor

    def loss_fn(shards):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = sharded(shards, buffers, input_ids=tokens, labels=tokens, use_cache=False).loss
        kept.most = len({ref.cdata for ref in kept if not ref.expired()})
        return loss

    for _ in range(2):  # the switch computes inside of units, which the first backward teaches
        with fs.record_events() as events:
            found = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))
    predicted = fs.predict_events(plan, sharded.schedule, recomputed=units if again else ())
    return found, tuple(events), predicted, kept.most


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # transformers renames it
@pytest.mark.parametrize("name", MODELS)
def test_hugging_faces_switch_keeps_the_bits_and_the_prediction(name):
    with_it, without = (run_simulated(hugging, 2, name, again) for again in (True, False))
    for (found, events, predicted, most), (wanted, others, _, before) in zip(with_it, without, strict=True):
        same_bits(found, wanted)
        assert events == predicted == others
        assert most < before / 2
