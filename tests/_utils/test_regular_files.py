"""Files of formats are opened as regular files, and no reader waits for a pipe; released pages come back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils.regular_files import open_regular, read_regular, regular_size, release_pages
from funcshard.estimate import load_hardware

MESH = fs.Mesh()
PLAN = fs.make_plan({"w": torch.zeros(2)}, MESH)

# Each reads a folder, and the name in it that is a pipe.
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "restore": ("x/index.json", lambda folder: fs.restore(folder / "x", PLAN, MESH)),
    "describe": ("x/index.json", lambda folder: fs.restore(folder / "x")),
    "a file of safetensors": ("w.safetensors", lambda folder: fs.import_safetensors(folder / "w.safetensors", PLAN, MESH)),
    "a folder of safetensors": ("model.safetensors", lambda folder: fs.import_safetensors(folder, PLAN, MESH)),
    "an index of safetensors": (
        "model.safetensors.index.json", lambda folder: fs.import_safetensors(folder, PLAN, MESH),
    ),
    "import_dcp": (".metadata", lambda folder: fs.import_dcp(folder, PLAN, MESH)),
    "load_traced": ("step.json", lambda folder: fs.load_traced(folder / "step.json", MESH)),
    "from_pretrained": (
        "model.safetensors",
        lambda folder: fs.from_pretrained(folder, MESH, model=torch.nn.Linear(2, 1, device="meta")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READERS)
def test_a_pipe_ends_in_an_error_at_once(case: str, tmp_path: Path) -> None:
    name, read = READERS[case]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} must be a regular file; found a named pipe: remove it"):
        read(tmp_path)


def test_a_description_of_hardware_is_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hardware.json")
    with pytest.raises(ValueError, match="hardware must be one of"):
        load_hardware(tmp_path / "hardware.json")


def test_what_is_no_regular_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    for path, options, found in (
        (tmp_path, {}, "a folder"), (tmp_path / "link", {"links": False}, "a link"), (Path("/dev/null"), {}, "a device"),
    ):  # fmt: skip
        for read in (read_regular, regular_size, open_regular):
            with pytest.raises(ValueError, match=f"must be a regular file; found {found}"):
                read(path, **options)
    with pytest.raises(ValueError, match="file has 3 bytes, and such a file has at most 2"):
        read_regular(tmp_path / "file", most=2)
    assert read_regular(tmp_path / "link", most=3) == b"abc"


# --- released pages -------------------------------------------------------------------------------


PAGE = 4096


def resident(tensor: torch.Tensor) -> int:
    """Return how many kilobytes of the mapping around a tensor are in this process's memory."""
    found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (first := line.split()[0]):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and first == "Rss:":
            found = int(line.split()[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not list its mappings")
def test_released_pages_of_a_file_are_no_memory_of_the_process_and_can_be_read_again(tmp_path: Path) -> None:
    size = 64 * PAGE
    values = torch.arange(size, dtype=torch.int32).to(torch.uint8)
    (tmp_path / "file").write_bytes(bytes(values.tolist()))
    storage = torch.UntypedStorage.from_file(str(tmp_path / "file"), False, size)
    mapped = torch.empty(0, dtype=torch.uint8).set_(storage, 8, (size - 8,))
    assert torch.equal(mapped, values[8:])
    assert resident(mapped) == size // 1024
    release_pages(mapped)
    assert resident(mapped) == 0
    assert torch.equal(mapped, values[8:])


def test_a_tensor_in_memory_of_its_own_keeps_its_values() -> None:
    own = torch.ones(1 << 20)
    release_pages(own)
    release_pages(own[:0])
    assert own.sum() == 1 << 20
