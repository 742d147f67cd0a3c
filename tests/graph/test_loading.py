"""A traced step in a file: the same bits without the model's code, and no file that does harm."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.commands import Command
from tests.graph.linear import BATCH, made, same
from tests.json_damage import changed_once
from tests.ranks import on_ranks


@pytest.fixture(scope="module")
def traced() -> fs.graph.Traced:
    mesh = fs.Mesh()
    return fs.trace(*made(mesh), BATCH)


@pytest.fixture(scope="module")
def file(traced: fs.graph.Traced, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "step.json"
    traced.save(path)
    return path


def test_a_loaded_step_says_what_the_traced_one_says(traced: fs.graph.Traced, file: Path) -> None:
    loaded = fs.load_traced(file, fs.Mesh())
    assert loaded.fingerprint() == traced.fingerprint()
    assert str(loaded) == str(traced)
    assert (loaded.memory(), loaded.cost(), loaded.events) == (traced.memory(), traced.cost(), traced.events)
    assert loaded.plan == traced.plan
    assert b"pickle" not in file.read_bytes()


def test_a_compiled_step_saves_its_graph_and_a_loaded_one_can_be_compiled(traced, file: Path, tmp_path: Path) -> None:
    traced.compile("eager").save(tmp_path / "compiled.json")
    assert (tmp_path / "compiled.json").read_bytes() == file.read_bytes()
    loaded = fs.load_traced(file, fs.Mesh())
    found = []
    for take in (made(fs.Mesh())[0], loaded.compile("eager")):
        _, state = made(fs.Mesh())
        for _ in range(2):
            state, metrics = take(state, BATCH)
        found.append((fs.copy(state), metrics))
    assert same(*found)
    with pytest.raises(ValueError, match=r"no graph for these arguments.*found float32\[1, 3\].*loaded without its step"):
        loaded.compile("eager")(state, BATCH[:1])


NEW_PROCESS = """
import os, torch, funcshard as fs
torch.set_num_threads(1)
graph, state_file, batches = os.environ["FILES"].split(os.pathsep)
loaded = fs.load_traced(graph, fs.Mesh())
state = fs.TrainState(**torch.load(state_file))
for batch in torch.load(batches):
    state, metrics = loaded(state, batch)
torch.save((state._asdict(), metrics), state_file)
"""


@pytest.mark.nightly
def test_a_new_process_without_the_model_takes_the_same_steps(traced: fs.graph.Traced, file: Path, tmp_path: Path) -> None:
    _, state = made(fs.Mesh())
    torch.save(state._asdict(), tmp_path / "state.pt")
    batches = [BATCH + number for number in range(3)]
    torch.save(batches, tmp_path / "batches.pt")
    files = os.pathsep.join([str(file), str(tmp_path / "state.pt"), str(tmp_path / "batches.pt")])
    process = Command(["-c", NEW_PROCESS], {**os.environ, "FILES": files})
    assert process.communicate(timeout=240) == ("", "")
    for batch in batches:
        state, metrics = traced(state, batch)
    assert same(torch.load(tmp_path / "state.pt"), (state._asdict(), metrics))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another shape": (lambda s: (s, BATCH[:1]), r"leaf `batch`: recorded float32\[2, 3\], found float32\[1, 3\]"),
    "other strides": (lambda s: (s, BATCH.t().contiguous().t()), r"recorded strides \[3, 1\], found strides \[1, 2\]"),
    "a state without shards": (lambda s: (s._replace(shards={}), BATCH), r"lacks the leaf `state.shards\[''\]\['float32'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_arguments_are_refused_without_a_step_and_the_difference_is_named(file: Path, case: str) -> None:
    change, words = REFUSED[case]
    loaded = fs.load_traced(file, fs.Mesh())
    with pytest.raises(ValueError, match=words):
        loaded(*change(made(fs.Mesh())[1]))


def test_with_its_step_a_loaded_one_records_other_arguments(file: Path) -> None:
    step, state = made(fs.Mesh())
    loaded = fs.load_traced(file, fs.Mesh(), step=step)
    batch = BATCH[:1]
    (found, _), (expected, _) = loaded(fs.copy(state), batch), step(fs.copy(state), batch)
    assert same(found, expected)


@pytest.mark.slow
def test_schedules_come_from_the_step(tmp_path: Path) -> None:
    mesh = fs.Mesh()
    step, state = made(mesh, lr=lambda step: 0.1 / (1 + step))
    fs.trace(step, state, BATCH).save(tmp_path / "step.json")
    for given in (None, made(mesh)[0]):
        with pytest.raises(ValueError, match=r"computes the option 'lr' .*pass load_traced\(path, mesh, step=step\)"):
            fs.load_traced(tmp_path / "step.json", mesh, step=given)
    loaded = fs.load_traced(tmp_path / "step.json", mesh, step=step)
    one, other = fs.copy(state), fs.copy(state)
    for _ in range(2):
        (one, _), (other, _) = loaded(one, BATCH), step(other, BATCH)
    assert same(one, other)


@pytest.mark.slow
def test_the_first_step_of_a_scaler_needs_the_step(tmp_path: Path) -> None:
    mesh = fs.Mesh()
    step, state = made(mesh, momentum=0.9, scaler=fs.GradScaler())
    fs.trace(step, state, BATCH).save(tmp_path / "step.json")
    with pytest.raises(ValueError, match="the first step with a GradScaler or weights runs without its graph"):
        fs.load_traced(tmp_path / "step.json", mesh)(state, BATCH)


# --- changed graphs -------------------------------------------------------------------------------


def without_views(step_graph: Any) -> Any:
    """Return the graph with one view fewer, as a pass might."""
    new = step_graph.copy()
    node = new.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)[0]
    node.update_arg(1, list(node.args[1]))
    return new


def test_a_file_holds_changed_graphs_and_loaded_ones_take_changes(traced: fs.graph.Traced, tmp_path: Path) -> None:
    mesh = fs.Mesh()
    step, state = made(mesh)
    traced.changed(without_views).save(tmp_path / "step.json")
    loaded = fs.load_traced(tmp_path / "step.json", mesh, step=step).changed(without_views)
    (found, _), (expected, _) = loaded(fs.copy(state), BATCH), step(fs.copy(state), BATCH)
    assert same(found, expected)
    with pytest.raises(ValueError, match="passes changed its graphs before it was saved, and a new one would lack them"):
        loaded(state, BATCH[:1])


# --- other plans, meshes and versions -------------------------------------------------------------


def test_other_meshes_and_files_are_refused_on_every_rank(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recorded on a mesh of 1 replicate × 1 shard; found .* 1 replicate × 2 shard"):
        fs.simulate(lambda mesh: fs.load_traced(file, mesh), 2)
    with pytest.raises((ValueError, FileNotFoundError), match=r"rank \d reads another file|No such file"):
        fs.simulate(lambda mesh: fs.load_traced(file if mesh.rank else tmp_path / "none", mesh), 2)


def test_a_plan_is_compared_with_that_of_the_file_also_beside_a_step(file: Path) -> None:
    other_plan = fs.make_plan({"other": torch.ones(3)}, 1)
    for step in (None, made(fs.Mesh())[0]):
        with pytest.raises(ValueError, match=rf"; found plan {other_plan.fingerprint()}: trace the step again"):
            fs.load_traced(file, fs.Mesh(), plan=other_plan, step=step)


def forged(file: Path, path: Path, change: Callable[[str], str]) -> Path:
    """Write a changed file whose checksum is right."""
    text = file.read_text().partition("\n")[2]
    new = change(text)
    assert new != text, "the change must change something"
    head = json.dumps({"format": "funcshard.graph/3", "sha256": hashlib.sha256(new.encode()).hexdigest()})
    path.write_text(f"{head}\n{new}")
    return path


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


POWER = "aten::pow.Tensor_Scalar"
FORGED: dict[str, tuple[Callable[[str], str], str]] = {
    "no JSON": (lambda text: "abc", "cannot be read"),
    "deep JSON": (lambda text: text.partition("\n")[0] + "\n" + "[" * 100_000, "nested in more than 500 levels"),
    "a deep tree": (replaced('"form":', f'"form":{"[" * 900}1{"]" * 900},"x":'), "nested in more than 500 levels"),
    "another torch": (replaced(torch.__version__.partition("+")[0], "1.0.0"), "recorded with torch 1.0.0"),
    "an operator that reads files": (replaced(POWER, "aten::from_file.default"), "must not run other code"),
    "an unknown overload": (replaced(POWER, "aten::pow.none"), "has none of that name"),
    "an endless power": (lambda text: re.sub(f'"{POWER}",.[^]]*', '"operator.pow",[9,9', text), "operator.pow without"),
    "a huge number": (replaced("[2,2]", f"[{2**70},2]"), "cannot be loaded"),
    "a constant that is too short": (replaced('"float32",[2],', '"float32",[3],'), "because it is damaged"),
    "a class of a module that is not loaded": (replaced("funcshard:TrainState", "antigravity:x"), "no loaded module has"),
    "a class that is no container": (replaced("funcshard:TrainState", "subprocess:Popen"), "which isn't a namedtuple"),
    "code in the name of an argument": (replaced('{"dtype"', '{"x=1;import os"'), "cannot be loaded"),
    "an operation before its inputs": (replaced('["%t",', '["%later",'), "because it is damaged"),
    "arguments that do not fit": (replaced('"aten::t.default",[', '"aten::t.default",[3,'), r"::t cannot run: aten::t\("),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_file_is_refused(file: Path, tmp_path: Path, case: str) -> None:
    change, words = FORGED[case]
    with pytest.raises(ValueError, match=words):
        fs.load_traced(forged(file, tmp_path / "forged.json", change), fs.Mesh())


@pytest.mark.nightly
def test_every_small_change_of_a_file_with_a_right_checksum_is_read_or_is_a_value_error(file: Path, tmp_path: Path) -> None:
    _, *texts = file.read_text().split("\n", 2)
    facts, graphs = map(json.loads, texts)
    changes = [(data, graphs) for _, data in changed_once(facts, 100)]
    changes += [(facts, data) for _, data in itertools.islice(changed_once(graphs, 600), 0, None, 3)]
    errors = 0
    for change in changes:
        text = "".join(f"{json.dumps(part)}\n" for part in change)
        try:
            fs.load_traced(forged(file, tmp_path / "forged.json", lambda _, text=text: text), fs.Mesh())
        except ValueError:
            errors += 1
    assert 200 < errors < 400


def test_every_flipped_byte_is_seen(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    path = tmp_path / "flipped.json"
    head = data.index(b"\n")
    for position in (*range(head + 1), *range(head + 1, len(data), 97)):
        data[position] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"flipped\.json"):
            fs.load_traced(path, fs.Mesh())
        data[position] ^= 1


# --- several ranks --------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(2)
def test_a_file_holds_the_graph_of_each_rank_if_their_collectives_are_the_same(mesh: fs.Mesh, tmp_path: Path) -> None:
    step, state = made(mesh)
    batch = torch.ones(2 + mesh.rank, 3)
    traced = fs.trace(step, state, batch)
    traced.save(tmp_path / "step.json")
    loaded = fs.load_traced(tmp_path / "step.json", mesh, step=step)
    assert str(loaded) == str(traced)
    (found, _), (expected, _) = loaded(fs.copy(state), batch), step(fs.copy(state), batch)
    assert same(found, expected)
    if mesh.rank == 1:
        traced = traced.changed(lambda step_graph: step_graph)
    with pytest.raises(ValueError, match="ranks 0 and 1 differ in the plan, the mesh, the number of passes"):
        traced.save(tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()
