"""Decoders from configurations: published numbers of parameters, shapes, gradients, positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from funcshard.demo import DECODERS, DecoderConfig, ExpertSizes, LatentSizes, decoder
from funcshard.demo.gpt import GPTConfig

# Sources: config.json of each model at huggingface.co; MPT: scripts/train/benchmarking/README.md of
# github.com/mosaicml/llm-foundry, by context length.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-34b": 33_743_970_304,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-3b": 3_212_749_824,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
    "mpt-125m": 125_311_488,
    "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_658_859_008,
    "mpt-13b": 12_853_954_560,
    "mpt-30b": 29_975_214_080,
    "mpt-70b": 64_862_437_376,
}

SMALL = DecoderConfig(dim=32, layers=2, heads=4, vocabulary=61, hidden=48)
LATENT = LatentSizes(query=12, key_value=8, rotary=4, plain=8, value=6)
EXPERTS = ExpertSizes(count=4, per_token=2, hidden=16)
DEEP = dataclasses.replace(EXPERTS, shared=1, dense_layers=1, scores="sigmoid")
CASES = {
    "llama": SMALL,
    "grouped": dataclasses.replace(SMALL, kv_heads=2),
    "tied": dataclasses.replace(SMALL, tied=True),
    "gpt": GPTConfig(width=32, layers=2, heads=4, context=16, vocabulary=61, tied=False),
    "mixture": dataclasses.replace(SMALL, experts=EXPERTS),
    "latent": dataclasses.replace(SMALL, latent=LATENT),
    "deepseek": dataclasses.replace(SMALL, latent=LATENT, experts=DEEP),
}
cases = pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())


Config = DecoderConfig | GPTConfig


def meta(config: str | Config, **changes: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return decoder(config, **changes)


def numel(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def tokens(batch: int = 2, length: int = 10) -> torch.Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(0))


def published(name: str, **changes: Any) -> int:
    """Count a model by four of its blocks, since all others are equal to the fourth."""
    three, four = (numel(meta(name, layers=layers, **changes)) for layers in (3, 4))
    return four + (DECODERS[name].layers - 4) * (four - three)


@pytest.mark.slow
def test_named_configurations_have_the_published_number_of_parameters() -> None:
    assert {name: published(name) for name in PUBLISHED} == PUBLISHED
    assert published("mpt-7b", context=1024) == 6_654_664_704


@pytest.mark.slow
@cases
def test_small_models_train_and_no_token_sees_a_later_one(config: Config) -> None:
    if getattr(config, "experts", None) is not None:
        # Why: experts with a row for every token drop none, which would depend on later tokens.
        config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, per_token=4))
    torch.manual_seed(0)
    model = decoder(config)
    one, other = tokens(1, 10), tokens(1, 10)
    other[:, 6:] = (other[:, 6:] + 1) % 61
    torch.testing.assert_close(model(one)[:, :6], model(other)[:, :6])
    assert not torch.allclose(model(one)[:, 6:], model(other)[:, 6:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch, losses = tokens(2, 10), []
    for _ in range(5):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if not name.endswith("router.bias"):  # it changes the choice of experts alone
                assert parameter.grad is not None, name
                assert parameter.grad.isfinite().all(), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_a_mixture_adds_the_weighted_outputs_of_the_chosen_experts() -> None:
    torch.manual_seed(0)
    mixture = decoder(CASES["mixture"], experts=dataclasses.replace(EXPERTS, per_token=4)).blocks[0].mlp
    x = torch.randn(2, 5, 32)
    weights = mixture.router.gate(x).softmax(-1)
    expected = sum(weights[..., i, None] * expert(x) for i, expert in enumerate(mixture.experts))
    torch.testing.assert_close(mixture(x), expected)


def test_every_expert_computes_the_same_number_of_rows_and_the_rest_is_dropped() -> None:
    torch.manual_seed(0)
    mixture = decoder(CASES["mixture"], experts=dataclasses.replace(EXPERTS, per_token=1)).blocks[0].mlp
    rows: list[tuple[int, ...]] = []
    for expert in mixture.experts:
        expert.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape))
    torch.nn.init.zeros_(mixture.router.gate.weight)  # a tie: all tokens choose one expert
    x = torch.randn(1, 10, 32)
    y = mixture(x)
    chosen = mixture.router(x.flatten(0, 1))[1].unique()
    assert rows == [(3, 32)] * 4  # 10 tokens · 1 / 4 experts, rounded up
    assert chosen.numel() == 1
    torch.testing.assert_close(y[:, :3], mixture.experts[int(chosen)](x[:, :3]))
    assert not y[:, 3:].any()


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "unknown name": (lambda: decoder("llama9"), r"no decoder has the name 'llama9'; the names are llama2-7b"),
    "no configuration": (lambda: decoder(3), r"takes a name or a DecoderConfig; found int"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "words"), ERRORS.values(), ids=ERRORS)
def test_helpful_errors(call: Callable[[], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()
