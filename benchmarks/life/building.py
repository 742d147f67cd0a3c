"""Fill a model that no rank holds whole: with new values, or with those of a Hugging Face folder."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.models import build, by_fsdp2, reset

__all__ = ["CASES"]

_MILLIONS = 98
_FILES = 4  # of a Hugging Face folder


def _planned(place: Place) -> Any:
    """Return the module on meta, its plan and its mesh."""
    import funcshard as fs

    module, mesh = build(_MILLIONS, place, "meta"), fs.init_mesh(device="cpu")
    return module, fs.make_plan(fs.make_functional(module)[1], mesh, units=["blocks.*"]), mesh


# --- new values -----------------------------------------------------------------------------------


def _our_init(place: Place) -> Turn:
    import funcshard as fs

    module, plan, mesh = _planned(place)

    def turn() -> float:
        torch.manual_seed(0)
        with place.timed():
            shards, _ = fs.init_module(module, plan, mesh, reset=reset)
        return _print(fs.to_state_dict(shards, plan, mesh))

    return turn


def _our_block_init(place: Place) -> Turn:
    import funcshard as fs

    module, plan, mesh = _planned(place)

    def turn() -> None:
        torch.manual_seed(0)
        with place.timed():
            fs.init_module(module, plan, mesh, reset=reset, draws="blocks")

    return turn


def _their_init(place: Place) -> Turn:
    def turn() -> None:
        module = by_fsdp2(build(_MILLIONS, place, "meta"), place.size)
        torch.manual_seed(place.rank)
        with place.timed(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DTensor warns that ranks draw without a common generator
            module.to_empty(device="cpu")
            for each in module.modules():
                reset(each)

    return turn


def _their_same_init(place: Place) -> Turn:
    """Rank 0 writes the values of the whole model and broadcasts them; the values are those of ours."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    def turn() -> float:
        module, whole = by_fsdp2(build(_MILLIONS, place, "meta"), place.size), build(_MILLIONS, place, "meta")
        torch.manual_seed(0)
        with place.timed(), torch.no_grad():
            state: dict[str, Any] = {}
            if place.rank == 0:
                whole = whole.to_empty(device="cpu")
                whole.head.weight = whole.token.weight  # type: ignore[union-attr]
                whole.apply(reset)
                state = whole.state_dict()
            module.to_empty(device="cpu")
            set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
            del state, whole
        return _print(get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))

    return turn


# --- values of a Hugging Face folder --------------------------------------------------------------


def _write(place: Place) -> None:
    """Write the model as ``save_pretrained`` does: several files and an index."""
    from safetensors.torch import save_file

    if place.rank:
        return
    (folder := place.directory / "hf").mkdir()
    state = {name: value for name, value in build(_MILLIONS, place).state_dict().items() if name != "head.weight"}
    names = list(state)
    where = {}
    for i in range(_FILES):
        file = f"model-{i + 1:05}-of-{_FILES:05}.safetensors"
        part = names[i * len(names) // _FILES : (i + 1) * len(names) // _FILES]
        save_file({name: state[name].contiguous() for name in part}, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file))
    total = sum(value.nbytes for value in state.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": where})
    )


def _our_load(place: Place) -> Turn:
    import funcshard as fs

    _, plan, mesh = _planned(place)

    def turn() -> float:
        with place.timed():
            shards = fs.import_safetensors(place.directory / "hf", plan, mesh)
        return _print(fs.to_state_dict(shards, plan, mesh))

    return turn


def _their_load(place: Place) -> Turn:
    """Rank 0 reads the files and broadcasts them, as torch's tutorial on FSDP2 does."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    def turn() -> float:
        module = by_fsdp2(build(_MILLIONS, place, "meta"), place.size)
        with place.timed():
            state: dict[str, Any] = {}
            if place.rank == 0:
                for file in sorted(Path(place.directory / "hf").glob("*.safetensors")):
                    state |= load_file(file)
                state["head.weight"] = state["token.weight"]
            module.to_empty(device="cpu")
            set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
            del state
        return _print(get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))

    return turn


def _their_load_by_dcp(place: Place) -> Turn:
    """Every rank reads its own shards, by DCP's reader of Hugging Face folders."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    def turn() -> float:
        module = by_fsdp2(build(_MILLIONS, place, "meta"), place.size)
        with place.timed():
            module.to_empty(device="cpu")
            state = get_model_state_dict(module)
            state.pop("head.weight", None)
            dcp.load(state, storage_reader=HuggingFaceStorageReader(str(place.directory / "hf")))
            set_model_state_dict(module, state, options=StateDictOptions(strict=False))
        return _print(get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))

    return turn


def _print(state: dict[str, Any]) -> float:
    """Return a number that depends on all values."""
    return sum(float(value.double().norm()) for name, value in state.items() if name != "head.weight")


_INIT = "initialise: meta to shards, GPT, 98 M"
_RESET, _SAME = "FSDP2, to_empty and reset, other values on each rank", "FSDP2, the same values from rank 0"
_LOAD = "load a Hugging Face folder to shards, GPT, 98 M"
_BROADCAST, _DCP = "FSDP2, set_model_state_dict from rank 0", "FSDP2, DCP's reader"
CASES = (
    Case("init-blocks", f"{_INIT}, `draws='blocks'`", _RESET, 0.8, _our_block_init, _their_init, ranks=(2, 4)),
    Case("init", _INIT, _RESET, 0.8, _our_init, _their_init, ranks=(2, 4)),
    Case("init-same", _INIT, _SAME, 0.8, _our_init, _their_same_init, ranks=(2, 4)),
    Case("load", _LOAD, _BROADCAST, 0.7, _our_load, _their_load, before=_write),
    Case("load-dcp", _LOAD, _DCP, 0.7, _our_load, _their_load_by_dcp, before=_write),
    Case(
        "load-memory",
        f"{_LOAD}, peak",
        _BROADCAST,
        0.7,
        _our_load,
        _their_load,
        before=_write,
        measure="bytes",
        most_rounds=3,
    ),
    Case(
        "load-memory-dcp",
        f"{_LOAD}, peak",
        _DCP,
        0.7,
        _our_load,
        _their_load_by_dcp,
        before=_write,
        measure="bytes",
        most_rounds=3,
    ),
)
