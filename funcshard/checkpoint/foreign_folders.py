"""Folders of other libraries, told apart by the names in them, so that nothing is imported."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from funcshard.checkpoint.folders import foreign_names, has_our_index

_SHARDS = "shards = from_state_dict(state_dict, plan, mesh)"
_REWRITE = (
    "write it as safetensors with transformers, as in AutoModelForCausalLM.from_pretrained(folder"
)

# Names that a library writes, as patterns, and how to read its folder. The first one counts.
_FOLDERS = {
    "adapter_config.json": (
        "an adapter of peft, and not the model under it: to go on training the adapter, give "
        "peft.PeftModel.from_pretrained(model, folder, is_trainable=True) to make_functional; for "
        "one model, call its merge_and_unload().save_pretrained(another_folder)"
    ),
    "snapshots": (
        "a cache of the hub: pass the folder that huggingface_hub.snapshot_download(name) returns"
    ),
    "_CHECKPOINT_METADATA _METADATA manifest.ocdbt": (
        "a checkpoint of orbax: restore it with orbax.checkpoint, convert its arrays with "
        f"torch.from_numpy, and call {_SHARDS}"
    ),
    "zero_to_fp32.py *_model_states.pt *_optim_states.pt": (
        "a checkpoint of DeepSpeed: run its zero_to_fp32.py, which writes one file of the state "
        f"dict, and call {_SHARDS}"
    ),
    "*.ckpt": (
        "a checkpoint of Lightning: read a file with state_dict = torch.load(file, "
        f"weights_only=True)['state_dict'], and call {_SHARDS}"
    ),
    ".metadata": (
        "a checkpoint of torch.distributed.checkpoint: import_dcp(path, plan, mesh) reads the "
        "parameters and the optimizer state"
    ),
    "*.gguf": f"a file of GGUF: {_REWRITE}, gguf_file=name).save_pretrained(another_folder)",
    "pytorch_model*.bin": f"a file of torch.save: {_REWRITE}).save_pretrained(another_folder)",
    "*.safetensors *.safetensors.index.json": (
        "files of safetensors: import_safetensors(path, plan, mesh) takes a file, and "
        "from_pretrained(path, mesh) a folder of Hugging Face"
    ),
}


def what_it_holds(folder: Path, otherwise: str = "") -> str:
    """Return the end of an error about a folder: what it holds, and how to read that.

    If no library is known to write such a folder, this is ``otherwise``, or its first names.
    """
    if has_our_index(folder):
        return "save wrote this checkpoint: restore(path, plan, mesh) reads it"
    file_names = foreign_names(folder)
    for patterns, remedy in _FOLDERS.items():
        for pattern in patterns.split():
            if matching_names := fnmatch.filter(file_names, pattern):
                return f"it holds {matching_names[0]!r}, as {remedy}"
    return otherwise or (f"it holds {file_names[:3]}" if file_names else "it is empty")
