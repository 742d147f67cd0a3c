"""safetensors and Hugging Face read our files, and we read theirs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import safetensors.torch
import torch
from filelock import FileLock

import funcshard as fs
from funcshard.checkpoint.safetensors import open_tensors
from tests.ranks import on_ranks
from tests.states import equal

PARAMS = {
    "w": torch.randn(5, 3), "half": torch.randn(7).bfloat16(), "count": torch.arange(4), "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "odd": torch.arange(3, dtype=torch.uint8),
    "double": torch.randn(3).double(),
}  # fmt: skip


def export(mesh: fs.Mesh, path: str, **options: Any) -> Any:
    low = fs.MixedPrecision(param_dtype=torch.bfloat16)  # files hold leaves as they are, whatever they are computed in
    plan = fs.make_plan(PARAMS, mesh, units=["w", "half"], precision=low, offload=True)
    files = fs.export_safetensors(path, fs.shard(PARAMS, plan, mesh), plan, mesh, **options)
    return files, fs.gather(fs.import_safetensors(path, plan, mesh), plan, mesh)


def written(path: Path, params: Any, **options: Any) -> list[Path]:
    """Export params in one process."""
    plan = fs.make_plan(params, 1)
    return fs.export_safetensors(path, fs.shard(params, plan, fs.Mesh()), plan, fs.Mesh(), **options)


@pytest.mark.parametrize("world", [1, 3, {"replicate": 2, "shard": 2}], ids=str)
def test_one_file_is_what_safetensors_reads_and_comes_back(world: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "net.safetensors"
    for files, back in fs.simulate(lambda mesh: export(mesh, path, buffers={"extra": torch.ones(2)}), world):
        assert files == [path]
        assert equal(back, PARAMS)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert equal(safetensors.torch.load_file(path), {**PARAMS, "extra": torch.ones(2)})
    assert [file.name for file in path.parent.iterdir()] == ["net.safetensors"]
    safetensors.torch.save_file({**PARAMS, "more": torch.zeros(1)}, path)  # and we read theirs
    plan = fs.make_plan(PARAMS, 1)
    assert equal(fs.gather(fs.import_safetensors(path, plan, fs.Mesh()), plan, fs.Mesh()), PARAMS)


def test_several_files_are_no_larger_than_asked_and_come_back(tmp_path: Path) -> None:
    files, back = fs.simulate(lambda mesh: export(mesh, tmp_path, max_shard_size=40), 2)[1]
    assert equal(back, PARAMS)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {tmp_path / name for name in index["weight_map"].values()} == set(files)
    for file in files:
        read = safetensors.torch.load_file(file)
        assert len(read) == 1 or sum(leaf.nbytes for leaf in read.values()) <= 40
        assert all(index["weight_map"][name] == file.name for name in read)
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in PARAMS.values())


@pytest.mark.parametrize("before", ["1KB", 40])
def test_nothing_of_an_earlier_export_is_taken_for_a_part_of_this_one(before: Any, tmp_path: Path) -> None:
    mesh = fs.Mesh()
    old, plan = fs.make_plan(PARAMS, mesh), fs.make_plan({"w": torch.zeros(15)}, mesh)
    (tmp_path / "model-of-mine.safetensors").touch()
    for size in (20, 10_000, 40):
        fs.export_safetensors(tmp_path, fs.shard(PARAMS, old, mesh), old, mesh, max_shard_size=before)
        shards = fs.shard({"w": torch.full((15,), float(size))}, plan, mesh)
        files = fs.export_safetensors(tmp_path, shards, plan, mesh, max_shard_size=size)
        assert {*tmp_path.iterdir()} == {*files, tmp_path / "model-of-mine.safetensors"}
        assert fs.import_safetensors(tmp_path, plan, mesh)[""]["float32"].tolist() == [float(size)] * 15


def killed_at(moment: int, work: Callable[[], object]) -> bool:
    """Run some work in a process that ends before a file gets its name or goes; return whether it did."""
    if (pid := os.fork()) == 0:
        left = [moment]

        def counted(change: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                return os._exit(9) if left[0] < 0 else change(*arguments, **options)

            return call

        os.replace, Path.unlink = counted(os.replace), counted(Path.unlink)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def of_hugging_face(folder: Path) -> set[float]:
    """Return the values that Hugging Face finds: it looks for the one file first, and then for the index."""
    names = ["model.safetensors"]
    if not (folder / names[0]).exists():
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        names = sorted(set(index["weight_map"].values()))
    leaves = [leaf for name in names for leaf in safetensors.torch.load_file(folder / name).values()]
    return {value for leaf in leaves for value in leaf.tolist()}


@pytest.mark.nightly(one_in=3)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this test forks a process, and this system has no fork")
@pytest.mark.parametrize(("before", "after"), [(40, 40), (40, "1KB"), ("1KB", 40)])
def test_an_export_that_is_killed_leaves_one_export_or_says_that_none_is_whole(before, after, tmp_path: Path) -> None:
    params, mesh = {name: torch.zeros(10) for name in "abcd"}, fs.Mesh()
    plan = fs.make_plan(params, mesh, units=list("abc"))
    filled = lambda value: fs.shard({name: leaf + value for name, leaf in params.items()}, plan, mesh)  # noqa: E731
    export = lambda value, size: fs.export_safetensors(tmp_path, filled(value), plan, mesh, max_shard_size=size)  # noqa: E731
    for moment in range(20):
        export(1.0, before)
        killed = killed_at(moment, lambda: export(2.0, after))
        ours = {value for leaf in imported(tmp_path, plan, mesh).values() for value in leaf.tolist()}
        try:
            theirs = of_hugging_face(tmp_path)
        except FileNotFoundError:
            theirs = set()
        assert len(ours) == len(theirs) == 1 or ours == theirs == set(), "two exports are mixed"
        assert before == after == 40 or ours, "an export got lost"
        if not killed:
            break
    assert moment > 0
    assert ours == {2.0}
    export(3.0, after)
    assert not list(tmp_path.glob(".*")), "what the killed ones left"


def imported(folder: Path, plan: fs.Plan, mesh: fs.Mesh) -> Any:
    """Return the leaves of an export, or none if it is not whole."""
    try:
        return fs.gather(fs.import_safetensors(folder, plan, mesh), plan, mesh)
    except FileNotFoundError as error:
        return {} if str(error).endswith(": an export into it was interrupted; export again") else {"": torch.tensor([-1.0])}


@pytest.mark.slow
def test_two_exports_to_one_path_do_not_meet(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "net.safetensors"):
        name = "safetensors" if path == tmp_path else path.name
        with FileLock(tmp_path / f".{name}.lock"):
            with pytest.raises(OSError, match=r"cannot export to .*: another export to it is running: wait for it, or"):
                export(fs.Mesh(), str(path))
            export(fs.Mesh(), str(tmp_path / "other.safetensors"))
        export(fs.Mesh(), str(path))


def test_an_export_removes_what_killed_ones_left_and_no_checkpoint(tmp_path: Path) -> None:
    # The second one is another program's, and the third one of an export to another name.
    names = (".safetensors.part", ".safetensors.thesis.part", ".x.safetensors.part")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    export(fs.Mesh(), str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob(".*")) == sorted(names[1:])


def test_numbers_of_four_bits_count_one_by_one_in_files(tmp_path: Path) -> None:
    params, path = {"v": torch.ones(3)}, tmp_path / "net.safetensors"
    packed = torch.randint(0, 256, (2, 3), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    written(path, params, buffers={"packed": packed})
    for found in (safetensors.torch.load_file(path)["packed"], open_tensors(path)["packed"]):
        assert (found.dtype, found.shape) == (packed.dtype, (2, 3))
        assert torch.equal(found.view(torch.uint8), packed.view(torch.uint8))


def test_what_fails_on_rank_0_alone_is_said_on_all_and_the_mesh_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    def fails(file: BinaryIO, *_: object) -> None:
        file.write(b"half a file")
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("funcshard.checkpoint.safetensors._write_one", fails)
    said = set()

    def main(mesh: fs.Mesh) -> float:
        with pytest.raises(OSError, match=r"cannot export to .*: RuntimeError: can't allocate memory") as caught:
            export(mesh, str(tmp_path / "net.safetensors"))
        said.add(str(caught.value).removesuffix(" (found on rank 0)"))
        return fs.psum(torch.ones(1), mesh).item()

    assert fs.simulate(main, 2) == [2.0] * 2
    assert len(said) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["full tensors", "full tensors of rank 1", "pieces", "files"])
def test_other_dtypes_are_converted_on_request_alone(form: str, tmp_path: Path) -> None:
    params = {"b": torch.randn(3), "n": torch.arange(3), "w": torch.randn(5, 3)}
    half = {path: leaf.bfloat16() if leaf.is_floating_point() else leaf for path, leaf in params.items()}
    safetensors.torch.save_file(half, tmp_path / "model.safetensors")

    def main(mesh: fs.Mesh) -> None:
        plan, of_half = fs.make_plan(params, mesh), fs.make_plan(half, mesh)
        given = fs.to_state_dict(fs.shard(half, of_half, mesh), of_half, mesh, sharded=form == "pieces")

        def load(**options: bool) -> Any:
            if form == "files":
                return fs.import_safetensors(tmp_path, plan, mesh, **options)
            return fs.from_state_dict(given, plan, mesh, src=1 if "rank 1" in form else None, **options)

        back = fs.gather(load(cast=True), plan, mesh)
        assert {path: leaf.dtype for path, leaf in back.items()} == {path: leaf.dtype for path, leaf in params.items()}
        assert all(torch.equal(back[path], half[path].to(leaf.dtype)) for path, leaf in params.items())
        with pytest.raises(ValueError, match=r"'b' of .* dtype float32, as planned; found .* and bfloat16: pass cast=True"):
            load()
        plan = fs.make_plan({**params, "n": torch.zeros(3)}, mesh)  # integers are never converted
        with pytest.raises(ValueError, match=r"'n' of .* dtype float32, as planned; found \(3,\) and int64"):
            load(cast=True)

    fs.simulate(main, 2)


def test_files_are_written_in_another_dtype_on_request(tmp_path: Path) -> None:
    written(tmp_path, PARAMS, buffers={"extra": torch.ones(2)}, dtype=torch.float16)
    for name, leaf in safetensors.torch.load_file(tmp_path / "model.safetensors").items():
        meant = {**PARAMS, "extra": torch.ones(2)}[name]
        assert torch.equal(leaf, meant.half() if meant.is_floating_point() else meant)
    with pytest.raises(TypeError, match=r"dtype must be a floating-point dtype, .*; found 'bf16'"):
        written(tmp_path, PARAMS, dtype="bf16")


def test_a_tied_parameter_is_written_once_and_read_under_any_of_its_names(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    params = {"embed.weight": weight, "head.weight": weight}
    written(tmp_path, params)
    assert list(safetensors.torch.load_file(tmp_path / "model.safetensors")) == ["embed.weight"]
    safetensors.torch.save_file({"head.weight": torch.ones(5, 3)}, tmp_path / "model.safetensors")
    shards = fs.import_safetensors(tmp_path, fs.make_plan(params, 1), fs.Mesh())
    assert shards[""]["float32"].tolist() == [1.0] * 15


def holding(**params: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: safetensors.torch.save_file(params, path)


def with_index(text: str) -> Callable[[Path], Any]:
    return lambda path: path.with_name("model.safetensors.index.json").write_text(text)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a header that is a hole of 1 TB": (
        lambda path: (path.write_bytes((2**40 - 8).to_bytes(8, "little")), os.truncate(path, 2**40)), "header too large"
    ),
    "no file": (Path.unlink, "there is neither model.safetensors nor"),
    "half the data": (lambda path: os.truncate(path, 900), "file not fully covered"),
    "a pointer of Git LFS": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "a name that is not there": (holding(x=torch.zeros(3)), r"every leaf of the plan; missing: \['w'\]: it holds \['x'\]"),
    "another shape": (holding(w=torch.zeros(3)), r"leaf 'w' of .* must have shape \(300,\)"),
    "an index that is none": (with_index('{"weight_map": []}'), r"index\.json is damaged: .* JSON with a 'weight_map'"),
    "an index of files elsewhere": (with_index('{"weight_map": {"w": "../x"}}'), r"damaged: .* same folder; found '\.\./x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_said(name: str, tmp_path: Path) -> None:
    harm, words = BAD[name]
    holding(w=torch.zeros(300))(tmp_path / "model.safetensors")
    harm(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError if name == "no file" else ValueError, match=words):
        fs.import_safetensors(tmp_path, fs.make_plan({"w": torch.zeros(300)}, 1), fs.Mesh())


def test_a_dtype_without_a_place_in_the_format_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'z' is of torch\.complex128, which safetensors files cannot hold"):
        written(tmp_path, {"z": torch.zeros(3, dtype=torch.complex128)})


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_rank_that_finds_no_file_stops_every_rank(mesh: fs.Mesh, tmp_path: Path, failing: int) -> None:
    path = tmp_path / f"{mesh.rank}.safetensors"
    written(path, PARAMS)
    whose = "" if mesh.rank == failing else rf" \(found on rank {failing}\)$"
    with pytest.raises(FileNotFoundError, match=rf"there is no safetensors file at .*{whose}"):
        fs.import_safetensors(path if mesh.rank != failing else tmp_path / "absent", fs.make_plan(PARAMS, mesh), mesh)
