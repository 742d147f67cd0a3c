"""``restore`` returns the saved state, whole or not at all, also while another process saves; no checkpoint runs code."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch
import torchopt
from safetensors.torch import load_file

import funcshard as fs
from funcshard.checkpoint import contents, save_restore, writer
from tests.ranks import on_ranks, run_ranks, run_simulated
from tests.states import MESHES, OPTIMIZERS, PARAMS, equal, make_plan, train

FIRST = "4 ranks, every layer"
PLAN2 = make_plan("2 ranks, the root alone")


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_comes_back_to_the_bit_and_under_every_plan_what_replan_makes(optimizer: str, tmp_path: Path) -> None:
    plan = make_plan(FIRST)

    def main(mesh: fs.Mesh) -> Any:
        state, _ = train(mesh, plan, OPTIMIZERS[optimizer](), 2)
        fs.save(tmp_path / "a", state, plan, mesh)
        assert equal(fs.restore(tmp_path / "a", plan, mesh), state)
        return state

    states = fs.simulate(main, 4)
    for which in MESHES:
        new = make_plan(which)
        restored = fs.simulate(lambda mesh, new=new: fs.restore(tmp_path / "a", new, mesh), MESHES[which][0])
        replanned = fs.replan(states, plan, new)
        assert all(map(equal, restored, replanned))
        for state, again in zip(states, fs.replan(replanned, new, plan), strict=True):
            assert equal(again, {**state, "own": again["own"]})  # which is that of a rank of the other mesh


@on_ranks(2)
def test_what_is_trained_meanwhile_does_not_get_into_the_checkpoint(mesh: fs.Mesh, tmp_path: Path) -> None:
    shards = fs.shard(PARAMS, PLAN2, mesh)
    before = fs.copy(shards)
    with fs.record_events() as events:
        saving = fs.save(tmp_path / "a", {"shards": shards, "x": (x := torch.zeros(3))}, PLAN2, mesh, wait=False)
        for shard in [x, *(shard for unit in shards.values() for shard in unit.values())]:
            shard.add_(1)
        saving.wait()
    restored = fs.restore(tmp_path / "a", PLAN2, mesh)
    assert equal(restored["shards"], before)
    assert not restored["x"].any()
    assert not events


def test_savings_come_one_after_another_and_old_ones_go(tmp_path: Path) -> None:
    def main(mesh: fs.Mesh) -> list[bool]:
        saving, done = None, []
        for step in range(9, 13):
            before, path = saving, tmp_path / f"step-{step}"
            saving = fs.save(path, {"step": step}, PLAN2, mesh, wait=False, after=saving, keep=2)
            done.append(before is None or before.done)
        assert saving.wait() == saving.wait() == tmp_path / "step-12"
        return done

    assert fs.simulate(main, 2) == [[True] * 4] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-11", "step-12"]
    assert fs.restore(tmp_path / "step-11").values == {"step": 11}


def test_a_save_after_another_uses_its_memory_again_and_changes_neither(tmp_path: Path) -> None:
    plan, mesh = make_plan("one rank"), fs.Mesh()
    save = lambda value, after: fs.save(  # noqa: E731
        tmp_path / str(value), {"x": torch.full((50, 7), float(value)), "y": torch.tensor(value)}, plan, mesh,
        wait=False, after=after,
    )  # fmt: skip
    first = save(1, None)
    address = first.memory["x"].data_ptr()
    second, third = save(2, first), save(3, first)
    assert (second.memory["x"].data_ptr(), first.memory) == (address, {})
    assert third.memory["x"].data_ptr() != address
    for value, saving in ((1, first), (2, second), (3, third)):
        state = fs.restore(saving.wait(), plan, mesh)
        assert (state["x"].unique().tolist(), state["y"].item()) == ([value], value)
    larger = fs.save(tmp_path / "4", {"x": torch.ones(9999)}, plan, mesh, wait=False, after=third)
    assert larger.memory["x"].shape == (9999,)
    assert fs.save(tmp_path / "5", {"x": torch.ones(9)}, plan, mesh, after=larger).memory == {}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priorities are those of processes")
def test_a_thread_that_saves_while_training_goes_on_has_low_priority(tmp_path: Path, monkeypatch: Any) -> None:
    found, write, own = [], writer.Writer.write, os.getpriority(os.PRIO_PROCESS, 0)
    seen = lambda work: found.append(os.getpriority(os.PRIO_PROCESS, 0)) or write(work)  # noqa: E731
    monkeypatch.setattr(writer.Writer, "write", seen)
    for wait in (True, False):
        fs.save(tmp_path / "a", {"x": torch.ones(3)}, make_plan("one rank"), fs.Mesh(), wait=wait).wait()
    assert found == [own, max(own, writer.NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@on_ranks(4)
def test_any_reader_of_safetensors_opens_the_file_of_a_rank(mesh: fs.Mesh, tmp_path: Path) -> None:
    odd = torch.arange(3).to(torch.complex128)
    plan = fs.make_plan(PARAMS, mesh, units=["0"])
    others = {"half": torch.ones(2, 3).bfloat16(), "scalar": torch.tensor(True), "odd": odd}
    state = {"x": fs.shard(PARAMS, plan, mesh), **others}
    fs.save(tmp_path / "a", state, plan, mesh)
    restored = fs.restore(tmp_path / "a", plan, mesh)
    assert equal(restored, state)
    (file,) = (tmp_path / "a").glob(f"*-{mesh.rank}.safetensors")
    stored = load_file(file)
    for unit, shards in state["x"].items():
        for key, shard in shards.items():
            assert torch.equal(stored[".".join(filter(None, ("x", unit, key)))], shard)
    assert stored.keys() & {"half", "scalar", "odd"} == ({"half", "scalar", "odd"} if mesh.rank == 0 else set())
    if mesh.rank == 0:
        assert (stored["half"].shape, stored["scalar"].item()) == ((2, 3), True)
        assert stored["odd"].dtype == torch.uint8
        assert torch.equal(stored["odd"].view(torch.complex128), odd)  # the format has no such dtype


def test_a_rank_that_never_writes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = writer.Writer.write
    monkeypatch.setattr(writer.Writer, "write", lambda work: write(work) if work.mesh.rank != 1 else None)
    with pytest.raises(OSError, match=r"a is not saved: rank 1 has not written its part within 0\.2 s"):
        fs.simulate(lambda mesh: fs.save(tmp_path / "a", {"step": 1}, PLAN2, mesh, wait=False).wait(0.2), 2)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"timeout must be a finite number above 0; found 0: pass a number of seconds"):
        fs.save(tmp_path / "a", {"step": 1}, fs.make_plan(PARAMS, 1), fs.Mesh()).wait(timeout=0)


def test_two_savings_to_one_path_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going, wait = threading.Event(), writer.Writer.wait_for_all
    monkeypatch.setattr(writer.Writer, "wait_for_all", lambda work: going.wait(60) and wait(work))

    def main(mesh: fs.Mesh) -> str:
        going.clear()
        saving = fs.save(tmp_path / "a", {"step": 1}, PLAN2, mesh, wait=False)
        try:
            fs.save(tmp_path / "a", {"step": 2}, PLAN2, mesh)
        except ValueError as error:
            going.set()
            saving.wait()
            fs.save(tmp_path / "a", {"step": 3}, PLAN2, mesh)
            return str(error)

    said = fs.simulate(main, 2)
    assert f"already being saved to {tmp_path / 'a'}: pass the Saving that save returned as after=" in said[0]
    assert said[1] == f"{said[0]} (found on rank 0)"
    assert fs.restore(tmp_path / "a").values == {"step": 3}


@on_ranks(2)
def test_damage_that_one_rank_meets_is_raised_on_all(mesh: fs.Mesh, tmp_path: Path) -> None:
    path = tmp_path / "a"
    fs.save(path, fs.shard(PARAMS, PLAN2, mesh), PLAN2, mesh)
    (file,) = path.glob("*-1.safetensors")
    if mesh.rank == 0:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    fs.psum(torch.ones(1), mesh)
    whose = "[^)]$" if mesh.rank == 1 else r" \(found on rank 1\)$"
    with pytest.raises(ValueError, match=rf"^{file} is damaged: the bytes of .*{whose}"):
        fs.restore(path, PLAN2, mesh)


def fails_on_one(mesh: fs.Mesh, folder: str) -> tuple[str, list[str], float]:
    """Save where rank 1 cannot; return the error, what is in the folder, and a sum over the ranks afterwards."""
    # Why so large: the system takes memory of that size back, so no earlier test has left a rank some.
    params = {"w": torch.zeros(1 << 25)}
    plan = fs.make_plan(params, mesh)
    shards = fs.shard(params, plan, mesh)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if mesh.rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (16 << 20), limit[1]))
        with pytest.raises(RuntimeError) as caught:
            fs.save(Path(folder, "a"), {"s": shards}, plan, mesh, wait=False)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    total = fs.psum(torch.ones(1), mesh)
    left = os.listdir(folder)
    fs.psum(torch.ones(1), mesh)
    fs.save(Path(folder, "b"), {"step": 1}, plan, mesh, wait=False).wait()
    return str(caught.value), left, float(total)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process is Linux's")
def test_what_one_rank_cannot_save_is_said_on_all_and_the_mesh_goes_on(tmp_path: Path) -> None:
    (said, *_), (cause, *_) = results = run_ranks(fails_on_one, 2, str(tmp_path))
    assert "can't allocate memory" in cause
    assert said == f"{cause} (found on rank 1)"
    assert [rest for _, *rest in results] == [[[], 2.0]] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_can_start_no_thread_ends_the_save_on_all(failing: int, tmp_path: Path, monkeypatch: Any) -> None:
    start = writer.Writer.start

    def start_or_not(thread: writer.Writer) -> None:
        if thread.name.endswith(f"rank {failing}"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def main(mesh: fs.Mesh) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(writer.Writer, "start", start_or_not)
            with pytest.raises(OSError, match=rf"is not saved: rank {failing}: RuntimeError: can't start new") as caught:
                fs.save(tmp_path / "a", {"step": 1}, PLAN2, mesh, wait=False).wait()
        fs.psum(torch.ones(1), mesh)
        return str(caught.value)

    assert len(set(fs.simulate(main, 2))) == 1
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_are_saved_as_those_of_python(tmp_path: Path) -> None:
    state = {
        "best": np.float64(0.1), "loss": np.float32(0.1), "count": np.int64(2**60), "small": np.uint8(7),
        "done": np.bool_(True), "name": np.str_("a"), "nan": np.float64("nan"),
    }  # fmt: skip
    plan, mesh = make_plan("one rank"), fs.Mesh()
    fs.save(tmp_path / "a", {"values": state, "own": fs.PerRank(np.float64(0.5))}, plan, mesh)
    restored = fs.restore(tmp_path / "a", plan, mesh)
    found = restored["values"]
    assert [type(value) for value in found.values()] == [float, int, bool, float, str, float, int]
    assert math.isnan(found.pop("nan"))
    assert found == {name: value.item() for name, value in state.items() if name != "nan"}
    assert restored["own"].value == 0.5
    assert fs.replan([{"best": np.float64(0.1)}], plan, plan) == [{"best": 0.1}]
    with pytest.raises(TypeError, match=r"leaf 'x' of the state cannot be stored; .* found a complex"):
        fs.save(tmp_path / "b", {"x": np.complex64(1)}, plan, mesh)


@on_ranks(2)
def test_a_plan_of_other_dtypes_is_said_with_the_checkpoint_and_cast_converts(mesh: fs.Mesh, tmp_path: Path) -> None:
    params = {"w": torch.randn(5, 3), "v": torch.randn(4)}
    low = {name: leaf.bfloat16() for name, leaf in params.items()}
    plan, other = fs.make_plan(params, mesh, units=["v"]), fs.make_plan(low, mesh)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
    shards = fs.shard(params, plan, mesh)
    shards, opt_state = optimizer.step(fs.shard(params, plan, mesh), optimizer.init(shards), shards)
    average = {unit: {key: shard.double() for key, shard in flat.items()} for unit, flat in shards.items()}
    state = fs.TrainState(shards, {"mean": torch.ones(3)}, opt_state, 1)
    fs.save(tmp_path / "a", {"train": state, "average": average}, plan, mesh)
    words = rf"checkpoint {tmp_path / 'a'} holds leaf 'v' in float32, and it is of bfloat16 .* or pass cast=True"
    with pytest.raises(ValueError, match=words):
        fs.restore(tmp_path / "a", other, mesh)
    with pytest.raises(ValueError, match=r"the state holds .* in the stored dtype( \(found on rank 0\))?$"):
        fs.replan([state, state], plan, other)
    restored = fs.restore(tmp_path / "a", other, mesh, cast=True)
    train = restored["train"]
    found = fs.gather(train.shards, other, mesh)
    whole = fs.gather(shards, plan, mesh)
    assert all(torch.equal(found[name], whole[name].bfloat16()) for name in params)
    assert {leaf.dtype for leaf in restored["average"][""].values()} == {torch.float64}
    assert train.buffers["mean"].dtype == torch.float32
    grads = fs.shard(low, other, mesh)
    optimizer.step(grads, train.opt_state, train.shards)  # AdamW's averages are of the new dtype too
    same = fs.restore(tmp_path / "a", plan, mesh, cast=True)["train"]
    assert equal(same.shards, shards)


@on_ranks(2)
def test_a_stack_of_models_is_saved_as_a_list_and_says_so(mesh: fs.Mesh, tmp_path: Path) -> None:
    params = {"w": torch.arange(5.0)}
    plan = fs.make_plan(params, mesh)
    models = [fs.shard({"w": params["w"] * k}, plan, mesh) for k in (1, 2)]
    stack = {"": {"float32": torch.stack([model[""]["float32"] for model in models])}}
    with pytest.raises(ValueError, match=r"found \(2, 3\): .* Save several models as a list of trees"):
        fs.save(tmp_path / "stack", {"shards": stack}, plan, mesh)
    rows = [{"": {"float32": row}} for row in stack[""]["float32"]]
    fs.save(tmp_path / "list", {"shards": rows}, plan, mesh)
    restored = fs.restore(tmp_path / "list", plan, mesh)["shards"]
    for model, found in zip(models, restored, strict=True):
        torch.testing.assert_close(found, model)


ABSENT: dict[str, Callable[[dict[str, Any]], Any]] = {  # shards -> a state that lacks some of them
    "a buffer": lambda s: {**s, "b": dict.fromkeys(s["b"])},
    "below a buffer": lambda s: {name: {key: {"m": v, "v": None} for key, v in unit.items()} for name, unit in s.items()},
    "a unit": lambda s: {"masked": {**s, "b": None}},
    "an entry of an optimizer's list": lambda s: fs.TrainState(s, {}, {"mu": [s[""]["float32"], None]}, 3),
    "all entries of a list beside it": lambda s: fs.TrainState(s, {}, ((s[""]["float32"], None), [None, None]), 3),
    "the state of torchopt": lambda s: fs.TrainState(s, {}, torchopt.adam(1e-3).init({**s, "b": dict.fromkeys(s["b"])}), 0),
    "outside of shards": lambda s: {"shards": s, "none": None, "list": [None, 1, torch.ones(3)]},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ABSENT)
def test_none_comes_back_where_it_was_under_every_plan(what, tmp_path):
    params = {"a": torch.arange(6.0).view(2, 3), "b": {"w": torch.arange(5.0), "v": torch.ones(4)}}

    def main(mesh, units, saves):
        plan = fs.make_plan(params, mesh, units=units)
        shards = fs.shard(params, plan, mesh)
        if saves:
            fs.save(tmp_path / "x", ABSENT[what](shards), plan, mesh)
        return fs.restore(tmp_path / "x", plan, mesh), ABSENT[what](shards)

    for ranks, units, saves in ((2, ["b"], True), (3, ["b"], False), (1, ["b"], False)):
        for pair in run_simulated(main, ranks, units, saves):
            (found, structure), (wanted, other) = (optree.tree_flatten(each, none_is_leaf=True) for each in pair)
            assert structure == other
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


CRITIC = {"head": {"weight": torch.arange(15.0).reshape(3, 5)}, "scale": torch.ones(())}


def two_plans(which: str) -> dict[str, fs.Plan]:
    return {"generator": make_plan(which), "critic": fs.make_plan(CRITIC, MESHES[which][0])}


def save_two(mesh: fs.Mesh, path: str, which: str) -> dict[str, Any]:
    plans = two_plans(which)
    critic = fs.shard(CRITIC, plans["critic"], mesh)
    state = {
        "generator": train(mesh, plans["generator"], OPTIMIZERS["AdamW"](), 2)[0],
        "critic": {"average": [critic, critic], "own": fs.PerRank(torch.tensor([mesh.rank]))},
        "batch": torch.arange(3.0),
        "step": 7,
    }
    fs.save(path, state, plans, mesh)
    return state


@pytest.mark.slow
def test_one_checkpoint_holds_the_states_of_several_models_and_replans_each_of_them(tmp_path: Path) -> None:
    states = fs.simulate(lambda mesh: save_two(mesh, tmp_path / "a", FIRST), 4)
    assert fs.read_values(tmp_path / "a")["step"] == 7
    assert fs.restore(tmp_path / "a").plan == two_plans(FIRST)
    assert "under plans generator" in str(fs.restore(tmp_path / "a"))
    for which in MESHES:
        plans = two_plans(which)
        restored = fs.simulate(lambda mesh, plans=plans: fs.restore(tmp_path / "a", plans, mesh), MESHES[which][0])
        for key, plan in plans.items():
            replanned = fs.replan([state[key] for state in states], two_plans(FIRST)[key], plan)
            assert all(map(equal, [state[key] for state in restored], replanned))
        assert all(equal([state["batch"], state["step"]], [torch.arange(3.0), 7]) for state in restored)


# The plans that a rank saves two entries under, and restores them under, and the error.
SEVERAL: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "an entry of shards without a plan": ({"a": PLAN2}, {}, ValueError, "'b' .* holds shards, and no plan has the key"),
    "a plan without an entry": ({"c": PLAN2}, {}, ValueError, "found none for the plan of 'c'"),
    "no plan": ({}, {}, TypeError, "plan must be a plan, or a dictionary"),
    "plans that differ by rank": (lambda rank: {"ab"[rank]: PLAN2}, {}, ValueError, "the plans"),
    "restored under one plan": ({"b": PLAN2}, PLAN2, ValueError, "was saved under plans for 'b'; found one plan"),
    "restored under other keys": ({"b": PLAN2}, {"a": PLAN2}, ValueError, "saved under plans for 'b'; found plans for 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
@on_ranks(2)
def test_several_plans_must_be_those_of_entries_of_the_state(mesh: fs.Mesh, name: str, tmp_path: Path) -> None:
    plans, others, kind, words = SEVERAL[name]
    state = {"a": 1, "b": fs.shard(PARAMS, PLAN2, mesh)}
    with pytest.raises(kind, match=words):
        fs.restore(fs.save(tmp_path / "a", state, plans(mesh.rank) if callable(plans) else plans, mesh).path, others, mesh)


PLANS = {ranks: fs.make_plan({"w": torch.zeros(300)}, ranks) for ranks in (1, 2)}


def save(path: Path, step: int, ranks: int = 1) -> None:
    def main(mesh: fs.Mesh) -> None:
        shards = fs.shard({"w": torch.full((300,), float(step))}, PLANS[ranks], mesh)
        fs.save(path, {"shards": shards, "x": torch.full((50,), float(step)), "step": step}, PLANS[ranks], mesh)

    fs.simulate(main, ranks)


def found(path: Path, mesh: fs.Mesh) -> set[float]:
    """Return the steps that the parts of a restored state are of."""
    state = fs.restore(path, PLANS[mesh.world_size], mesh)
    return {state["step"], *state["x"].tolist(), *state["shards"][""]["float32"].tolist()}


MOMENTS = {
    "before the tables are read": (contents, "read_table"),
    "before the state is read": (save_restore, "_read_state"),
}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(moment, times, tmp_path, monkeypatch) -> None:
    path, (where, name), steps = tmp_path / "last", MOMENTS[moment], [0]
    save(path, 0)
    work = getattr(where, name)

    def replaced(*arguments: Any) -> Any:
        if steps[-1] < times:
            steps.append(steps[-1] + 1)
            thread = threading.Thread(target=save, args=(path, steps[-1]))
            thread.start()
            thread.join()
        return work(*arguments)

    monkeypatch.setattr(where, name, replaced)
    assert found(path, fs.Mesh()) == {times}
    assert fs.latest(tmp_path, thorough=True) == path


def test_ranks_that_find_different_checkpoints_begin_again_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, tries = tmp_path / "last", save_restore.read_contents, []
    for step in range(2):
        save(tmp_path / f"step-{step}", step, 2)

    def other(folder: Any) -> Any:
        tries.append(folder)
        contents = read(folder)
        if len(tries) == 1:
            path.unlink()
            path.symlink_to("step-1")
        return contents

    path.symlink_to("step-0")
    monkeypatch.setattr(save_restore, "read_contents", other)
    assert fs.simulate(lambda mesh: found(path, mesh), 2) == [{1}, {1}]
    assert len(tries) == 4


@pytest.mark.parametrize("times", [1, 3])
def test_latest_finds_one_while_another_job_saves_new_ones_and_deletes_the_old(times, tmp_path, monkeypatch) -> None:
    steps, read = [0], contents.read_contents

    def saved_meanwhile(path: Any) -> Any:
        if steps[-1] < times:
            steps.append(steps[-1] + 1)
            monkeypatch.setattr(contents, "read_contents", read)
            fs.save(tmp_path / f"step-{steps[-1]}", {"step": steps[-1]}, PLANS[1], fs.Mesh(), keep=1)
            monkeypatch.setattr(contents, "read_contents", saved_meanwhile)
        return read(path)

    save(tmp_path / "step-0", 0)
    monkeypatch.setattr(contents, "read_contents", saved_meanwhile)
    assert fs.latest(tmp_path) == tmp_path / f"step-{times}"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this test forks processes, and this system has no fork")
def test_an_old_job_and_its_restart_that_save_to_one_path_until_they_are_killed_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "last"
    save(path, 0)
    for number in range(4):
        before, pids = found(path, fs.Mesh()), []
        for job in (1, 2):
            pids.append(os.fork())
            if pids[-1] == 0:
                try:
                    save_again_and_again(path, 10_000 * (2 * number + job))
                finally:
                    os._exit(1)
        try:
            end, steps = time.monotonic() + 60, before
            while steps == before and time.monotonic() < end:
                steps = found(path, fs.Mesh())
                assert len(steps) == 1
                assert fs.latest(tmp_path) == path
            time.sleep(0.005 * number)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        assert steps != before, "neither job saved"
        assert len(found(path, fs.Mesh())) == 1
        assert fs.latest(tmp_path, thorough=True) == path
    save(path, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["last"], "what the killed jobs left"


def save_again_and_again(path: Path, step: int) -> None:
    while True:
        step += 1
        try:
            save(path, step)
        except ValueError as error:
            if "a checkpoint is already being saved to" not in str(error):
                raise
