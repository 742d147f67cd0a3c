"""Checkpoints that FSDP2 and DDP saved become shards, and damaged ones an error on every rank.

FSDP2 and DDP wrote ``data/fsdp2`` and ``data/ddp`` with torch 2.13 on two ranks: ``saved`` says what
they hold. Chunks of other shapes come from the files of ``save``, which are DCP's own.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import funcshard as fs
from tests.ranks import on_ranks

pytestmark = pytest.mark.slow  # torch.distributed.checkpoint is imported for a second

DATA = Path(__file__).parent / "data"
ADAMW = fs.torch_optimizer(torch.optim.AdamW, lr=0.125)
WORLDS: dict[str, Any] = {"1 rank": 1, "3 ranks": 3, "2 × 2 ranks": {"replicate": 2, "shard": 2}}


def build() -> nn.Module:
    """Return the module that was saved, as it was before its step."""
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, affine=False))
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 8 + i)
        net[1].running_mean.copy_(torch.arange(5.0))
    return net


def saved(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the module and its optimizer after the step that ``data/fsdp2`` was saved after."""
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.125)
    for _ in range(steps):
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_of_fsdp2_becomes_shards_and_optimizer_state(world: str) -> None:
    net, theirs = saved(steps=1)
    _, params, buffers = fs.make_functional(build())

    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(params, mesh, units=["0"])
        shards, found, opt_state = fs.import_dcp(DATA / "fsdp2", plan, mesh, buffers=buffers, optimizer=ADAMW)
        by_name = fs.optimizer_to_state_dict(opt_state, ADAMW, plan, mesh)
        return fs.to_state_dict(shards, plan, mesh, buffers=found), by_name["state"], opt_state["steps"]

    for state_dict, state, steps in fs.simulate(main, WORLDS[world]):
        assert steps == 1
        torch.testing.assert_close(state_dict, dict(net.state_dict()))
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(state[name], theirs.state[parameter])


def test_a_checkpoint_of_ddp_has_its_prefix_taken_off() -> None:
    apply, params, buffers = fs.make_functional(build())
    plan, mesh = fs.make_plan(params, 1), fs.Mesh()
    shards, found, opt_state = fs.import_dcp(DATA / "ddp", plan, mesh, buffers=buffers)
    assert opt_state is None
    assert fs.to_state_dict(shards, plan, mesh, buffers=apply.persistent(found)).keys() == build().state_dict().keys()
    assert all(torch.equal(value, params[name]) for name, value in fs.gather(shards, plan, mesh).items())
    assert found["1.running_mean"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


PARAMS = {
    "a": torch.randn(5, 3),
    "b": torch.randn(7),
    "c": torch.tensor(2.5),
    "d": torch.randn(4, 6),
    "e": torch.zeros(0, 2),
}


def written(folder: Path, state: Any) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def loaded(mesh: fs.Mesh, folder: Path, params: Any = PARAMS, units: Any = ("a",), **options: Any) -> Any:
    plan = fs.make_plan(params, mesh, units=units)
    return fs.gather(fs.import_dcp(folder, plan, mesh, **options)[0], plan, mesh)


@pytest.mark.parametrize("local", ["whole leaves", "slices of rows", "slices of columns"])
def test_chunks_of_any_shape_are_read(local: str, tmp_path: Path) -> None:
    dim = {"slices of rows": 0, "slices of columns": 1}.get(local)
    options: Any = {} if dim is None else {"local": {"d": {"tensor": dim}}}

    def save(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(PARAMS if dim is None else {**PARAMS, "d": PARAMS["d"].chunk(2, dim)[0]}, mesh, **options)
        fs.save(tmp_path / "x", {"model": fs.from_state_dict(PARAMS, plan, mesh)}, plan, mesh)

    fs.simulate(save, 3 if dim is None else {"shard": 2, "tensor": 2})
    fs.export_dcp(tmp_path / "x", tmp_path / "y")
    for found in fs.simulate(lambda mesh: loaded(mesh, tmp_path / "y"), 2):
        assert all(torch.equal(found[name], value) for name, value in PARAMS.items())


def test_a_leaf_that_ranks_hold_in_slices_is_cut_and_so_is_its_optimizer_state(tmp_path: Path) -> None:
    floats = {name: leaf for name, leaf in PARAMS.items() if leaf.ndim}
    state = {name: {"step": torch.tensor(3.0), "exp_avg": leaf + 1, "exp_avg_sq": leaf + 2} for name, leaf in floats.items()}
    written(tmp_path / "x", {"model": floats, "optim": {"state": state}})

    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan({**floats, "d": floats["d"][:, :3]}, mesh, local={"d": {"tensor": 1}})
        shards, _, opt_state = fs.import_dcp(tmp_path / "x", plan, mesh, optimizer=ADAMW)
        return fs.to_state_dict(shards, plan, mesh), fs.optimizer_to_state_dict(opt_state, ADAMW, plan, mesh)["state"]

    for params, opt_state in fs.simulate(main, {"shard": 2, "tensor": 2}):
        torch.testing.assert_close(params, floats, rtol=0, atol=0)
        torch.testing.assert_close(opt_state, state, rtol=0, atol=0)


NAMES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "no key": (lambda p: p, {}),
    "a key": (lambda p: {"model": p}, {}),
    "keys in keys": (lambda p: {"app": {"model": p, "step": 3}}, {}),
    "of compiled modules": (lambda p: {"model": {f"_orig_mod.{name}": value for name, value in p.items()}}, {}),
    "one of two keys": (lambda p: {"model": p, "ema": {name: value + 1 for name, value in p.items()}}, {"key": "model"}),
    "another name of a tied one": (lambda p: p, {"params": {"0": PARAMS["a"], **PARAMS}}),
}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_found_under_their_names(name: str, tmp_path: Path) -> None:
    wrap, options = NAMES[name]
    found = loaded(fs.Mesh(), written(tmp_path / "x", wrap(PARAMS)), **options)
    assert all(torch.equal(found[path], value) for path, value in PARAMS.items())


def test_other_dtypes_are_converted_on_request_alone(tmp_path: Path) -> None:
    half = {name: value.bfloat16() for name, value in PARAMS.items()}
    written(tmp_path / "x", {"model": half})
    found = loaded(fs.Mesh(), tmp_path / "x", cast=True)
    assert all(torch.equal(found[name], value.float()) for name, value in half.items())
    with pytest.raises(ValueError, match=r"dtype float32, as planned; found \(.*\) and bfloat16: pass cast=True"):
        loaded(fs.Mesh(), tmp_path / "x")


def replaced(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new))

    return change


def harmful(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + str(folder / "ran").encode() + b"'\ntR.")


def pickled(data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / ".metadata").write_bytes(data)


def other_boxes(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return a change of the chunks of a tensor in the metadata."""

    def harm(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        name = next(name for name, each in metadata.state_dict_metadata.items() if len(getattr(each, "chunks", ())) > 1)
        change(metadata.state_dict_metadata[name])
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return harm


def second_chunk(**facts: Callable[[Any], Any]) -> Callable[[Path], None]:
    ((name, value_of),) = facts.items()
    return other_boxes(lambda stored: setattr(stored.chunks[1], name, torch.Size(value_of(stored))))


NAMED = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
# What a folder of FSDP2 is changed to, and words of the error.
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "there is no such folder"),
    "no metadata": (lambda path: (path / ".metadata").unlink(), "there is no .metadata in .*: it holds"),
    "a pickle that runs a program": (harmful, r"it names os\.system, and a pickle could run that"),
    "metadata of nothing": (pickled(b"N."), r"is not the metadata of torch"),
    "a pickle that changes a class": (pickled(NAMED + b"N}X\x07\x00\x00\x00plantedK\x01s\x86b."), "is not the metadata"),
    **{
        f"a pickle that reads an attribute of {asked!r}": (
            pickled(b"\x80\x02cbuiltins\ngetattr\n" + asked + b"X\x05\x00\x00\x00cleartR."),
            "is not the metadata of torch.*: it asks for 'clear' of a ",
        )
        for asked in (b"(ctorch\nfloat32\n", b"(ccollections\nOrderedDict\n", b"(X\x01\x00\x00\x00a")
    },
    "a file elsewhere": (replaced(".metadata", b"__0_0.distcp", b"../0_.distcp"), r"same folder; found '\.\./0_\.distcp'"),
    "chunks that lack a row": (other_boxes(lambda stored: stored.chunks.pop()), "it holds .* needed elements of"),
    "chunks that overlap": (second_chunk(offsets=lambda stored: stored.chunks[0].offsets), "bytes at .* aren't a tensor"),
    "a chunk outside": (second_chunk(sizes=lambda stored: [2**40] * len(stored.size)), "bytes at .* aren't a tensor"),
    "a chunk in no file": (second_chunk(offsets=lambda stored: [1] * len(stored.size)), "is damaged, or is not"),
    "a link out of the folder": (
        lambda path: ((path / "__0_0.distcp").unlink(), (path / "__0_0.distcp").symlink_to(DATA / "fsdp2" / "__0_0.distcp")),
        "must be a regular file; found a link: copy the folder",
    ),
    "a missing file": (lambda path: (path / "__1_0.distcp").unlink(), r"is incomplete: __1_0\.distcp is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_said_on_every_rank(name: str, tmp_path: Path) -> None:
    harm, words = BAD[name]
    harm(folder := shutil.copytree(DATA / "fsdp2", tmp_path / "x"))
    _, params, _ = fs.make_functional(build())

    def main(mesh: fs.Mesh) -> None:
        with pytest.raises(FileNotFoundError if name in ("no folder", "no metadata") else ValueError, match=words):
            loaded(mesh, folder, params, units=[])

    fs.simulate(main, 2)
    assert not (folder / "ran").exists()
    assert not hasattr(dcp.metadata.Metadata, "planted")


def test_members_of_enumerations_are_read_as_every_python_pickles_them(tmp_path: Path, monkeypatch) -> None:
    encoding = dcp.metadata._MEM_FORMAT_ENCODING
    forms: dict[str, Any] = {
        "3.11.2": lambda member, _: (getattr, (type(member), member.name)),
        "3.12": lambda member, _: (type(member), (member.value,)),
    }
    for version, form in forms.items():
        monkeypatch.setattr(encoding, "__reduce_ex__", form)
        found = loaded(fs.Mesh(), written(tmp_path / version, {"model": PARAMS}))
        assert all(torch.equal(found[name], value) for name, value in PARAMS.items())


def test_a_mistake_is_told(tmp_path: Path) -> None:
    written(tmp_path, {**PARAMS, "b": torch.zeros(8)})
    for options, kind, words in (
        ({}, ValueError, r"leaf 'b' of .* must have shape \(7,\) .* found \(8,\) and float32"),
        ({"params": {"a": PARAMS["a"]}, "optimizer": ADAMW}, ValueError, "no optimizer state by name, .*optimizer.init"),
        ({"buffers": [1]}, TypeError, "buffers must be a dictionary"),
    ):
        with pytest.raises(kind, match=words):
            loaded(fs.Mesh(), tmp_path, **options)


@on_ranks(2)
def test_ranks_that_find_different_checkpoints_are_told(mesh: fs.Mesh, tmp_path: Path) -> None:
    path = tmp_path / str(mesh.rank)
    with pytest.raises(ValueError, match=r"ranks found different checkpoints at .*: give every rank the same files"):
        loaded(mesh, written(path, PARAMS))
