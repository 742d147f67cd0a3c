"""The best plan: equal to brute force, monotone in the budget, and honest if nothing fits."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import funcshard as fs
from funcshard.estimate import Profile, Runtime, estimate, load_hardware, profile
from funcshard.estimate.machine import compute_time
from funcshard.estimate.search.best_plan import Best, auto_plan
from funcshard.estimate.search.infeasible import Change, Infeasible, changes_to_fit
from funcshard.estimate.search.scoring import Score, Scorer, unit_options
from funcshard.estimate.search.space import Candidate, Choice, Space, on_mesh
from funcshard.plan import make_plan
from tests.estimate.chains import Unit, chain

HARDWARE = "h100-8x400gbps"

sizes = st.integers(1, 50).map(lambda n: n * 2**18)
units = st.builds(
    Unit, numel=sizes, saved=sizes, out=sizes, temporary=sizes, flops=st.integers(0, 50).map(lambda n: n * 10**10)
)
# Units of two classes differ in size, so that the search and the brute force see the same classes.
groups = st.lists(st.tuples(units, st.integers(1, 2)), min_size=1, max_size=2, unique_by=lambda group: group[0].numel)
models = groups.map(lambda found: [unit for unit, count in found for _ in range(count)])


def brute_force(found: Profile, model: list[Unit], space: Space, ranks: int) -> list[tuple[float, int]]:
    """Estimate every plan of a space, written without the search: time and peak of each."""
    classes: dict[Unit, list[str]] = {}
    for i, unit in enumerate(model):
        classes.setdefault(unit, []).append(f"u{i}")
    equal = [names for names in classes.values() if len(names) > 1]
    alone = [names[0] for names in classes.values() if len(names) == 1]
    groups = [*equal, *([alone] if alone else [])]
    able = [0 if names is alone and equal else len(names) for names in groups]
    program = found.program(make_plan(found.forms, 1, units=["*"]))

    def cost(name: str) -> float:
        unit = model[int(name[1:])]
        taken = compute_time(load_hardware(HARDWARE), unit.flops, unit.saved + unit.out, "float32").seconds
        return taken / max(program.saved[name], 1)

    again = {id(names): names if names is not alone else sorted(names, key=cost) for names in groups}
    scores = []
    for shard in (size for size in range(1, ranks + 1) if ranks % size == 0):
        options = []
        for names, most in zip(groups, able, strict=True):
            # By default the largest class goes in steps of one unit.
            parts = space.remat or (most if most == max(able) and most not in able[: len(options)] else 8)
            counts = sorted({most * i // parts for i in range(parts + 1)})
            stays = sorted({len(names) * i // space.kept for i in range(space.kept + 1)})
            own: list[tuple[str, int, bool | None]] = [("no_shard" if shard > 1 else "full_shard", 0, None)]
            if shard > 1:
                own += [("full_shard", stay, True) for stay in stays]
            options.append([(names, *each, k) for each in own for k in counts])
        for choice in itertools.product(*options):
            remat: list[str] = []
            chosen: dict[str, dict[str, Any]] = {}
            for names, strategy, stay, freed_by, k in choice:
                remat += again[id(names)][:k]
                for position, name in enumerate(names):
                    kept = strategy == "full_shard" and position >= len(names) - stay
                    chosen[name] = {"strategy": "shard_grad_op" if kept else strategy}
                    chosen[name] |= {} if kept or freed_by is None or shard == 1 else {"reshard_after_forward": freed_by}
            ordered = {f"u{i}": chosen[f"u{i}"] for i in range(len(model))}
            plan = make_plan(found.forms, {"replicate": ranks // shard, "shard": shard}, units=ordered)
            report = estimate(found, plan, hardware=HARDWARE, remat=remat)
            scores.append((report.step_time, report.peak))
    return scores


SPACES = {"all": Space(remat=1, kept=1), "halves": Space(remat=2, kept=1), "units": Space(kept=1)}


@settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None,
    phases=[Phase.generate],
)  # fmt: skip
@given(models, st.sampled_from([*SPACES]), st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_the_best_plan_is_that_of_brute_force(model: list[Unit], kind: str, parts: list[float]) -> None:
    found = chain(model)
    ranks, space = 2, SPACES[kind]
    scores = brute_force(found, model, space, ranks)
    peaks = sorted(peak for _, peak in scores)
    before: Best | None = None
    for part in sorted(parts):
        budget = peaks[int(part * (len(peaks) - 1))]
        best = best_of(found, ranks=ranks, budget=budget, hardware=HARDWARE, space=space)
        assert best.considered == len(scores)
        assert (best.report.step_time, best.report.peak) == min(each for each in scores if each[1] <= budget)
        if before is not None:
            assert best.report.step_time <= before.report.step_time
            assert best.report.peak >= before.report.peak
        before = best


def best_of(found: Profile | list[Unit], **options: Any) -> Best:
    """Return the best plan of a profile, or of the chain of some units; every module is a unit."""
    best = auto_plan(found if isinstance(found, Profile) else chain(found), units=["*"], **options)
    assert isinstance(best, Best)
    return best


MODEL = [Unit(2**20, 2**22, 2**20, 2**18, 10**11)] * 6 + [Unit(2**21, 2**20, 2**18, 2**18, 10**10)]


@pytest.mark.parametrize("mesh", [(4, 16), (16, 4)])
def test_a_score_is_the_estimate_of_its_plan(mesh: tuple[int, int]) -> None:
    found = chain(MODEL)
    scorer = Scorer(
        profiles=[(1, found)], make={"mesh": {"shard": 1}, "units": ["*"]}, hardware=load_hardware(HARDWARE),
        optimizer=None, runtime=Runtime.on("cuda"),
    )  # fmt: skip
    choices = tuple(Choice("full_shard", 0, 0) for _ in scorer.classes)
    candidate = Candidate(0, mesh, choices)
    report = estimate(found, scorer.plan(candidate), hardware=HARDWARE, optimizer=None)
    assert scorer.score(candidate) == (report.step_time, report.peak)


@pytest.mark.parametrize("runtime", [Runtime.fsdp1(), Runtime.fsdp2(), Runtime.on("cuda")])
@pytest.mark.parametrize("hardware", ["h100-8x100gbps", "h100-8x400gbps"])
def test_all_reduces_beside_the_lane_count_beside_it_in_bounds(runtime: Runtime, hardware: str, monkeypatch) -> None:
    scored: list[tuple[Score, Score]] = []
    score = Scorer.score

    def checked(scorer: Scorer, candidate: Candidate) -> Score:
        found, fixed = score(scorer, candidate), scorer.fixed(candidate)
        scored.append((scorer.least(candidate, fixed), found))
        return found

    monkeypatch.setattr(Scorer, "score", checked)
    model, space = [Unit(2**26, 2**18, 2**18, 2**18, 10**9)] * 4, Space(remat=1, kept=1)
    monkeypatch.setattr(Runtime, "on", lambda device: runtime)
    best = best_of(model, ranks=16, hardware=hardware, space=space)
    for least, found in scored:
        assert 0.1 * found.step_time < least.step_time <= found.step_time
        assert 0.1 * found.peak < least.peak <= found.peak
    for replicate in (1, 2, 4, 8):
        plan = make_plan(chain(model).forms, {"replicate": replicate, "shard": 16 // replicate}, units=["*"])
        report = estimate(chain(model), plan, hardware=hardware)
        assert best.report.step_time <= report.step_time * (1 + 1e-9)


@pytest.mark.slow
def test_a_class_of_many_units_goes_in_steps_of_one_unit_which_fill_the_budget() -> None:
    model = [Unit(2**18, 2**22, 2**18, 2**18, 10**11)] * 24 + [Unit(2**21, 2**20, 2**18, 2**18, 10**10)]
    found = chain(model)
    names = [f"u{i}" for i in range(24)]
    plan = make_plan(found.forms, 2, units=["*"])
    scores = {k: estimate(found, plan, remat=names[:k]) for k in (0, *range(4, 25))}
    space = Space(meshes=((1, 2),), strategies=("full_shard",), kept=0)
    for wanted in (0, 4, 5, 11, 20, 22, 23):
        best = best_of(found, ranks=2, budget=scores[wanted].peak, space=space)
        assert best.considered == len(scores)
        assert best.remat == tuple(names[:wanted])
        assert (best.report.peak, best.report.step_time) == (scores[wanted].peak, scores[wanted].step_time)


def test_of_different_units_those_are_computed_again_first_that_take_the_least_time_for_each_byte() -> None:
    model = [Unit(2**18 + i, 2**22, 2**18, 2**18, flops * 10**10) for i, flops in enumerate((50, 1, 20, 2))]
    found = chain(model)
    plan = make_plan(found.forms, 2, units=["*"])
    before = estimate(found, plan).peak
    space = Space(meshes=((1, 2),), strategies=("full_shard",), kept=0)
    chosen = [best_of(found, ranks=2, budget=before - saved * 2**20, space=space).remat for saved in (1, 5, 7)]
    assert chosen == [("u1",), ("u1", "u3", "u2"), ("u1", "u3", "u2", "u0")]


def test_of_meshes_over_several_nodes_the_fastest_by_their_estimates_is_chosen() -> None:
    found = chain([Unit(2**24, 2**16, 2**16, 2**16, 10**9)] * 4)
    options: dict[str, Any] = {"strategies": ("full_shard",), "remat": 0, "kept": 0}
    seconds = {}
    for mesh in ((1, 32), (2, 16), (4, 8), (16, 2)):
        plan = make_plan(found.forms, {"replicate": mesh[0], "shard": mesh[1]}, units=["*"])
        seconds[mesh] = estimate(found, plan, hardware=HARDWARE).step_time
    assert len(set(seconds.values())) == len(seconds)
    best = best_of(found, ranks=32, hardware=HARDWARE, budget="4GiB", space=Space(meshes=tuple(seconds), **options))
    assert best.report.step_time == pytest.approx(min(seconds.values()))
    for mesh, taken in seconds.items():  # the search itself takes a plan's estimate for its time
        alone = best_of(found, ranks=32, hardware=HARDWARE, space=Space(meshes=(mesh,), **options))
        assert alone.pareto[0].seconds == pytest.approx(taken)


def test_the_result_says_all_that_makes_the_plan_again() -> None:
    found = chain(MODEL)
    best = best_of(found, ranks=4, budget="90MiB")
    again = estimate(best.profile, best.plan, schedule=best.schedule, remat=best.remat, accumulate=best.micro_batches)
    assert (again.peak, again.step_time) == (best.report.peak, best.report.step_time)
    options = {unit.name: {"strategy": unit.strategy} for unit in best.plan.unit_list}
    assert make_plan(found.forms, dict(best.plan.mesh_axes), units=options) == best.plan
    assert best.text == "4 shards, keep u6"  # the only unit of its class
    assert best.text in str(best)
    assert str(best).count("left") + str(best).count("too little") == len(best.pareto)
    assert all(each.text in best._repr_html_() for each in best.pareto)
    assert [(each.seconds, -each.peak) for each in best.pareto] == sorted((each.seconds, -each.peak) for each in best.pareto)


@pytest.mark.parametrize("model_axes", [{}, {"tensor": 2}], ids=str)
def test_the_plan_of_any_mesh_is_that_of_make_plan(model_axes: dict[str, int]) -> None:
    found = chain(MODEL[-3:])
    single = make_plan(found.forms, {"replicate": 1, "shard": 1, **model_axes}, units=["*"])
    for mesh, strategy in itertools.product(((1, 4), (2, 2), (4, 1)), ("full_shard", "shard_grad_op", "no_shard")):
        shape = {"replicate": mesh[0], "shard": mesh[1], **model_axes}
        made = make_plan(found.forms, shape, units=["*"], strategy=strategy)
        assert on_mesh(single, mesh, functools.partial(unit_options, strategy)) == made


@pytest.mark.slow
def test_micro_batches_are_chosen_too() -> None:
    half = [Unit(unit.numel, unit.saved // 2, unit.out // 2, unit.temporary // 2, unit.flops // 2) for unit in MODEL]
    space = Space(remat=0, strategies=("full_shard",))
    found = {1: chain(MODEL), 2: chain(half)}
    for size, number in (("200MiB", 1), ("72MiB", 2)):
        best = auto_plan(found, ranks=4, budget=size, units=["*"], space=space)
        assert isinstance(best, Best)
        assert best.micro_batches == number


def test_many_tiny_modules_become_a_group_as_in_a_plan_of_make_plan() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(40)))
    traced = fs.profile(*fs.make_functional(net), torch.zeros(8, 16))
    best = best_of(traced, ranks=4, space=Space(meshes=((1, 4),), strategies=("full_shard",), kept=1))
    assert [*best.plan.units] == [*make_plan(traced.forms, 4, units=["*"]).units] == ["0…39"]
    assert estimate(traced, make_plan(traced.forms, 4, units=["*"], bucket_bytes=0)).step_time > best.report.step_time


def test_if_nothing_fits_the_answer_says_why_and_what_would_help() -> None:
    space = Space(remat=0, strategies=("full_shard",))
    answer = auto_plan(chain(MODEL), ranks=4, budget="60MiB", units=["*"], space=space)
    assert isinstance(answer, Infeasible)
    assert not answer.fits
    text = str(answer)
    assert text.startswith(f"None of {answer.considered} plans fits 60.0 MiB. The leanest one, {answer.text}, needs ")
    assert any(each.fits for each in answer.changes)
    for change in answer.changes:
        assert change.fits == (change.report.peak <= 60 * 2**20)
        assert change.peak == change.report.peak - answer.report.peak < 0
        row = next(line for line in text.splitlines() if line.startswith(change.text))
        assert row.endswith("too little") != change.fits
        assert str(change).startswith(change.text)
    assert answer._repr_html_().count("<table") == 2


def test_a_change_goes_as_far_as_the_budget_asks_for() -> None:
    found = chain(MODEL)
    plan = make_plan(found.forms, 4, units=["*"])
    before = estimate(found, plan)
    counts = []
    for saved in (1, 2**22, 2**23):
        changes = changes_to_fit(found, estimate(found, plan, budget=before.peak - saved), HARDWARE)
        again = next(each for each in changes if each.text.startswith("remat"))
        assert again.fits
        assert again.share > 0
        counts.append(int(again.text.split()[1]))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def changes_of(found: Profile, plan: fs.Plan) -> tuple[Change, ...]:
    """Return the changes of a plan that never fits."""
    return changes_to_fit(found, estimate(found, plan, budget=1), HARDWARE)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 2**23, 2**30])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_change_keeps_the_groups_and_all_else_that_it_does_not_name(limit: int, strategy: str) -> None:
    found = chain([MODEL[0]] * 40)
    frees = strategy == "full_shard"
    units = {key: {"reshard_after_backward": frees} for key in ("", "*")}
    options = {"units": units, "strategy": strategy, "bucket_bytes": limit}
    plan, mesh = make_plan(found.forms, 4, **options), {"replicate": 2, "shard": 2}
    host = next(each for each in changes_of(found, make_plan(found.forms, mesh, **options)) if "host" in each.text)
    assert host.report.plan == make_plan(found.forms, mesh, **options, offload=True)
    changes = {each.text.partition(" more units")[0]: each for each in changes_of(found, plan)}
    more = next(each.report.plan for text, each in changes.items() if text.endswith("times as many ranks"))
    assert more.mesh_shape[1] > 4
    assert more == make_plan(found.forms, more.mesh_shape[1], **options)
    host = changes["offload shards to the host"].report.plan
    assert host == make_plan(found.forms, 4, **options, offload=True)
    if not frees and limit < 2**30:  # one group of all units has the same peak
        again = changes[f"reshard {len(plan.units.keys() - {''})}"].report.plan
        assert again == make_plan(found.forms, 4, **{**options, "strategy": "full_shard", "units": ["*"]})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"space": Space(meshes=((1, 3),))}, "meshes of the space must have 4 ranks"),
        ({"ranks": 0}, "ranks must be"),
        ({"budget": "80 apples"}, "budget must be a number of bytes"),
        ({"optimizer": "adam9"}, "optimizer must be 'adamw'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        auto_plan(chain(MODEL), **{"ranks": 4, "units": ["*"], **options})


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("further", [2, 0], ids=["units that look equal and save more", "equal units"])
def test_the_best_plan_of_a_traced_model_is_that_of_its_estimates(further: int) -> None:
    gelus = [1] * 9 + [1 + further] * 3
    net = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), *(torch.nn.GELU() for _ in range(number))) for number in gelus)
    )
    found = profile(*fs.make_functional(net), torch.zeros(256, 64))
    space = Space(remat=3, meshes=((1, 8),), strategies=("full_shard",), kept=0)
    plan = make_plan(found.forms, 8, units=[str(i) for i in range(12)])
    scores = {k: estimate(found, plan, remat=[str(i) for i in range(k)]) for k in (0, 4, 8, 12)}
    for budget in ((scores[4].peak + scores[8].peak) // 2, scores[8].peak - 1):
        best = best_of(found, ranks=8, budget=budget, space=space)
        fitting = [each for each in scores.values() if each.peak <= budget]
        fastest = min(fitting, key=lambda each: (each.step_time, each.peak))
        assert (best.report.peak, best.report.step_time) == (fastest.peak, fastest.step_time)
        assert scores[len(best.remat)] is fastest
