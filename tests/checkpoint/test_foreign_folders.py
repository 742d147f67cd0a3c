"""A folder that another library wrote is told apart from a broken one of ours, with its reader."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import funcshard as fs

MESH = fs.Mesh()
PLAN = fs.make_plan({"w": torch.zeros(2)}, MESH)
FOLDERS: dict[str, tuple[list[str], str]] = {
    "orbax": (["_METADATA", "_CHECKPOINT_METADATA", "d/x", "manifest.ocdbt"], "of orbax: restore it with orbax"),
    "DeepSpeed": (["latest", "zero_to_fp32.py", "global_step9/x"], r"of DeepSpeed: run its zero_to_fp32\.py"),
    "Lightning": (["epoch=1.ckpt"], "of Lightning: read a file with state_dict = torch.load"),
    "DCP": ([".metadata", "__0_0.distcp"], r"of torch\.distributed\.checkpoint: import_dcp\(path, plan, mesh\)"),
    "Hugging Face": (
        ["config.json", "model.safetensors"],
        r"safetensors: import_safetensors\(path, plan, mesh\) takes a file, and from_pretrained",
    ),
    "safetensors": (["x.safetensors"], r"holds 'x\.safetensors', as files of safetensors: import_safetensors"),
    "an old Hugging Face": (
        ["config.json", "pytorch_model.bin"],
        r"holds 'pytorch_model\.bin', as a file of torch\.save: write it as safetensors",
    ),
    "none": (["notes.txt"], r"its index\.json is missing, so it was not saved to the end"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_restore_says_which_library_wrote_a_folder(case: str, tmp_path: Path) -> None:
    names, words = FOLDERS[case]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=words):
        fs.restore(tmp_path)


def test_other_readers_say_it_too(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    for read in (fs.import_dcp, fs.import_safetensors):
        with pytest.raises(FileNotFoundError, match=r"it holds 'last\.ckpt', as a checkpoint of Lightning"):
            read(tmp_path, PLAN, MESH)


def test_a_broken_one_of_ours_is_none_of_another_library(tmp_path: Path) -> None:
    fs.save(tmp_path / "x", {"step": 1}, PLAN, MESH)
    for read in (fs.import_dcp, fs.import_safetensors):
        shutil.copytree(tmp_path / "x", tmp_path / "copy", dirs_exist_ok=True)
        (tmp_path / "copy" / ".metadata").unlink(missing_ok=True)
        with pytest.raises(FileNotFoundError, match=r"save wrote this checkpoint: restore\(path, plan, mesh\) reads it"):
            read(tmp_path / "copy", PLAN, MESH)
    (tmp_path / "x" / "index.json").unlink()
    with pytest.raises(ValueError, match=r"its index\.json is missing, so it was not saved to the end"):
        fs.restore(tmp_path / "x")
