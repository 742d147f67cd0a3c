"""Folders without ``model.safetensors``: which program wrote them, and how to read them."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

from funcshard._utils import file_data, read_regular
from funcshard.checkpoint.folders import has_our_index
from funcshard.checkpoint.foreign_folders import foreign_remedy


def what_it_holds(folder: Path) -> str:
    """Return the end of an error about a folder: the files that it holds, and what to do."""
    names = sorted(path.name for path in folder.iterdir())
    cls = _architecture(_json(folder / "config.json"))
    if "adapter_config.json" in names:
        base = _json(folder / "adapter_config.json").get("base_model_name_or_path")
        return (
            f"it holds an adapter of peft{f' for {base!r}' if base else ''}, and not the model "
            "under it: to go on training the adapter, give peft.PeftModel.from_pretrained(model, "
            "folder, is_trainable=True) to make_functional; for one model, call its "
            "merge_and_unload().save_pretrained(another_folder)"
        )
    if has_our_index(folder):
        return "save wrote this checkpoint: restore(path, plan, mesh) reads it"
    if "snapshots" in names:
        return "it is a cache of the hub: pass the folder that huggingface_hub.snapshot_download(name) returns"
    ways = {
        "*.gguf": "from_pretrained(folder, gguf_file={!r})",
        "pytorch_model*": "from_pretrained(folder)",
    }
    for pattern, remedy in ways.items():
        if matching_names := fnmatch.filter(names, pattern):
            return (
                f"it holds {matching_names[0]!r}, which is not in the safetensors format: write it so with "
                f"transformers, as in {cls}.{remedy.format(matching_names[0])}.save_pretrained(another_folder)"
            )
    if matching_names := fnmatch.filter(names, "*.safetensors"):
        return f"it holds {matching_names[0]!r}: pass the path of this file to import_safetensors, with a plan of the model"
    if foreign := foreign_remedy(folder):
        return foreign
    return f"it holds {names[:3]}" if names else "it is empty"


def _json(file: Path) -> dict[str, Any]:
    """Return what a file says, or nothing if it is absent or damaged."""
    try:
        json_data = file_data.parse(read_regular(file, most=1 << 20))
    except (OSError, ValueError):
        return {}
    return json_data if isinstance(json_data, dict) else {}


def _architecture(config: dict[str, Any]) -> str:
    """Return the name of a model's class in transformers, or a likely one."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "AutoModelForCausalLM"
