"""Tell which library wrote a folder that is no checkpoint of this one, by the names in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

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
        lambda names: ".metadata" in names and "sizes.json" not in names,  # save writes both
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


def foreign_remedy(folder: Path | int) -> str:
    """Return which other library wrote a folder and how to read it; ``""`` if that is unknown.

    Arguments:
        folder: the folder, or its descriptor.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Path(folder, "last.ckpt").touch()
        ...     foreign_remedy(Path(folder)).partition(":")[0]
        'it looks like a checkpoint of Lightning'
    """
    try:
        names = set(os.listdir(folder))
    except OSError:
        return ""
    for library, fits, remedy in _LIBRARIES:
        if fits(names):
            return f"it looks like a checkpoint of {library}: {remedy}"
    return ""
