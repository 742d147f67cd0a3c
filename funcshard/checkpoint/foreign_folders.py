"""Folders of other libraries."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

from funcshard._utils import file_data
from funcshard._utils.regular_files import read_regular
from funcshard.checkpoint.folders import foreign_names, has_our_index

_SHARDS = "shards = from_state_dict(state_dict, plan, mesh)"

# For each library: whether names are those of a folder that it writes, and how to read it. The
# first one that fits counts.
_LIBRARIES: tuple[tuple[str, Callable[[set[str]], bool], str], ...] = (
    (
        "orbax",
        lambda names: bool(names & {"_CHECKPOINT_METADATA", "manifest.ocdbt"}) or {"_METADATA", "d"} <= names,
        ("restore it with orbax.checkpoint, convert its arrays with torch.from_numpy, and call "
        f"{_SHARDS}"),
    ),
    (
        "DeepSpeed",
        lambda names: "zero_to_fp32.py" in names or any(n.endswith(("_model_states.pt", "_optim_states.pt")) for n in names),
        f"run its zero_to_fp32.py, which writes one file of the state dict, and call {_SHARDS}",
    ),
    (
        "Lightning",
        lambda names: ".metadata" in names and "meta.pt" in names,
        "import_dcp(path, plan, mesh) reads the parameters of such a checkpoint",
    ),
    (
        "Lightning",
        lambda names: any(name.endswith(".ckpt") for name in names),
        ("read a file with state_dict = torch.load(file, weights_only=True)['state_dict'], and "
        f"call {_SHARDS}"),
    ),
    (
        "torch.distributed.checkpoint",
        lambda names: ".metadata" in names,
        ("import_dcp(path, plan, mesh) reads the parameters and the optimizer state of such a "
        "checkpoint"),
    ),
    (
        "Hugging Face",
        lambda names: "config.json" in names and any(name.endswith(".safetensors") for name in names),
        ("from_pretrained(path, mesh) reads the model, and import_safetensors(path, plan, mesh) "
        "its parameters"),
    ),
    (
        "safetensors",
        lambda names: any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names),
        "import_safetensors(path, plan, mesh) reads its parameters",
    ),
    (
        "Hugging Face",
        lambda names: any(name.startswith("pytorch_model") and name.endswith(".bin") for name in names),
        f"read its files with torch.load(file, weights_only=True), and call {_SHARDS}",
    ),
)  # fmt: skip


def foreign_remedy(folder: Path) -> str:
    """Return which other library wrote a folder and how to read it, or ``""``."""
    try:
        file_names = set(foreign_names(folder))
    except OSError:
        return ""
    # Note: names alone decide, so nothing of another library is imported.
    for library, fits, remedy in _LIBRARIES:
        if fits(file_names):
            return f"it looks like a checkpoint of {library}: {remedy}"
    return ""


def what_it_holds(folder: Path) -> str:
    """Return the end of an error about a folder: what it holds, and what to do."""
    file_names = sorted(path.name for path in folder.iterdir())
    cls = _architecture(_json(folder / "config.json"))
    if "adapter_config.json" in file_names:
        base = _json(folder / "adapter_config.json").get("base_model_name_or_path")
        return (
            f"it holds an adapter of peft{f' for {base!r}' if base else ''}, and not the model "
            "under it: to go on training the adapter, give peft.PeftModel.from_pretrained(model, "
            "folder, is_trainable=True) to make_functional; for one model, call its "
            "merge_and_unload().save_pretrained(another_folder)"
        )
    if has_our_index(folder):
        return "save wrote this checkpoint: restore(path, plan, mesh) reads it"
    if "snapshots" in file_names:
        return "it is a cache of the hub: pass the folder that huggingface_hub.snapshot_download(name) returns"
    ways_to_read = {
        "*.gguf": "from_pretrained(folder, gguf_file={!r})",
        "pytorch_model*": "from_pretrained(folder)",
    }
    for pattern, remedy in ways_to_read.items():
        if matching_names := fnmatch.filter(file_names, pattern):
            return (
                f"it holds {matching_names[0]!r}, which is not in the safetensors format: write it so with "
                f"transformers, as in {cls}.{remedy.format(matching_names[0])}.save_pretrained(another_folder)"
            )
    if matching_names := fnmatch.filter(file_names, "*.safetensors"):
        return f"it holds {matching_names[0]!r}: pass the path of this file to import_safetensors, with a plan of the model"
    if foreign := foreign_remedy(folder):
        return foreign
    return f"it holds {file_names[:3]}" if file_names else "it is empty"


def _json(file: Path) -> dict[str, Any]:
    """Return a file's JSON, or nothing if it's absent or damaged."""
    try:
        json_data = file_data.parse(read_regular(file, most=1 << 20))
    except (OSError, ValueError):
        return {}
    return json_data if isinstance(json_data, dict) else {}


def _architecture(config: dict[str, Any]) -> str:
    """Return a model's class in transformers, or a likely one."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "AutoModelForCausalLM"
