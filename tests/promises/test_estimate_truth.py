"""The simulated peak of a step against the measured one, which ``benchmarks/memory_truth.json`` holds."""

import dataclasses
import json

import pytest
import torch

import funcshard as fs
from benchmarks.memory_truth import CASES, FILE, MODELS, Case, Setup, measure, prepare
from funcshard._utils.table import Table
from funcshard.estimate import OPTIMIZERS, OptimizerMemory, Runtime, profile

MEASURED = json.loads(FILE.read_text())
MOST = 0.004  # largest accepted relative error

# Of the options of a step, estimate knows these.
KNOWN = {"accumulate", "reduce", "donate", "max_norm"}
SIMULATED = [name for name, case in CASES.items() if case.step.keys() <= KNOWN]
FAST = [name for name in SIMULATED if CASES[name].model == "gpt" and CASES[name].samples == 4]
MEMORY = {
    ("AdamW", ()): OPTIMIZERS["adamw_single"],
    ("AdamW", ("fused",)): OPTIMIZERS["adamw_fused"],
    ("AdamW", ("foreach",)): OptimizerMemory(temporaries="all"),
    ("SGD", ()): OPTIMIZERS["sgd"],
    ("SGD", ("momentum",)): OPTIMIZERS["sgd_momentum"],
}


class Simulate:
    """The simulated peak of a case; profiles are kept for cases of one model."""

    def __init__(self) -> None:
        self.profiles = {}

    def __call__(self, setup: Setup) -> int:
        case, parts = setup.case, setup.case.step.get("accumulate", 1)
        key = (case.model, case.mixed, case.remat == "checkpoint", case.samples // parts)
        if key not in self.profiles:
            inputs, targets = (tensor.chunk(parts)[0] for tensor in setup.batch)
            given = setup.apply, setup.params, setup.buffers, inputs
            traced = profile(*given, loss=setup.model.loss, targets=targets, precision=setup.plan)
            self.profiles[key] = traced.on(accelerator=False)  # the truth has the attention of the CPU
        cls, options = case.optimizer
        report = fs.estimate(
            self.profiles[key],
            setup.plan,
            optimizer=dataclasses.replace(
                MEMORY[cls, tuple(options)],
                donate=case.step.get("donate", True),
                clip="max_norm" in case.step,
            ),
            schedule=setup.schedule,
            remat=setup.remat,
            accumulate=fs.Accumulation(parts, case.step.get("reduce", "each")),
            runtime=Runtime(accelerator=setup.mesh.device.type != "cpu"),
        )
        return report.peak


def check(names):
    """Compare cases; on an error above 0.4 % show all such cases."""
    simulate, bad = Simulate(), []
    for name in names:
        peak, simulated = MEASURED["cases"][name]["peak"], simulate(prepare(CASES[name]))
        error = simulated / peak - 1
        if abs(error) > MOST:
            bad.append([name, f"{peak:,}", f"{simulated:,}", f"{100 * error:+.2f} %"])
    text = str(Table("peaks in bytes", ["case", "measured", "simulated", "error"], bad))
    assert not bad, f"{len(bad)} of {len(names)} cases:\n{text}"
    return names


@pytest.mark.slow
def test_the_simulated_peak_is_the_measured_one():
    assert len(check(FAST[::6])) > 12


@pytest.mark.nightly
def test_the_simulated_peak_is_the_measured_one_for_every_model_strategy_precision_remat_and_offload():
    assert len(check(SIMULATED)) > 270


@pytest.mark.nightly(one_in=9)  # the first case sees the most
@pytest.mark.parametrize("strategy", ["slices", "shard_grad_op", "full_shard"])
@pytest.mark.parametrize("remat", ["remat", "none"])
@pytest.mark.parametrize("storage", [None, {"**": fs.nf4()}, {"**": fs.int8()}], ids=["plain", "nf4", "int8"])
def test_the_simulated_peak_is_the_measured_one_with_frozen_units(monkeypatch, strategy, remat, storage):
    gpt = MODELS["gpt"]

    def frozen(mesh):
        model = gpt.build(mesh)
        model.blocks.requires_grad_(False)
        return model

    monkeypatch.setitem(MODELS, "frozen gpt", dataclasses.replace(gpt, build=frozen))
    case = Case("frozen gpt", strategy, mixed=storage is not None, remat=remat, plan={"storage": storage})
    assert Simulate()(prepare(case)) == pytest.approx(measure(case).peak, rel=MOST)


@pytest.mark.nightly(one_in=4)
@pytest.mark.skipif(not torch.__version__.startswith(MEASURED["torch"]), reason="measured with another version of torch")
@pytest.mark.parametrize(
    "name", ["gpt full_shard bf16", "llama slices remat", "moe hybrid checkpoint", "convnet no_shard bf16 remat offload"]
)
def test_the_file_holds_what_is_measured(name):
    found, kept = measure(CASES[name]), MEASURED["cases"][name]
    assert (found.first, found.peak, found.between, found.host) == tuple(
        kept[key] for key in ("first", "peak", "between", "host")
    )


def test_every_case_is_in_the_file():
    assert MEASURED["cases"].keys() == CASES.keys()
