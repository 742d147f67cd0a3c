"""Fill a model that no rank holds whole: with new values, or with those of a Hugging Face folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.sides import Theirs, gpt, on_meta

_MILLIONS = 98
_FILES = 4  # of a Hugging Face folder


def _planned(place: Place) -> Any:
    """Return the module on meta, its plan and its mesh."""
    import funcshard as fs

    module, mesh = on_meta(gpt(place, _MILLIONS)), fs.init_mesh(device="cpu")
    return module, fs.make_plan(fs.make_functional(module)[1], mesh, units=["blocks.*"]), mesh


def _theirs_on_meta(place: Place) -> Any:
    shape = gpt(place, _MILLIONS)
    return Theirs(shape, on_meta(shape)).module


def _set_from_rank_0(place: Place, module: Any, read: Callable[[], dict[str, Any]]) -> None:
    """Broadcast a state dict of rank 0, as torch's tutorial on FSDP2 does."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state = read() if place.rank == 0 else {}
    module.to_empty(device="cpu")
    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def _print(state: dict[str, Any]) -> float:
    """Return a number that depends on all values."""
    return sum(float(value.double().norm()) for name, value in state.items() if name != "head.weight")


def _print_theirs(module: Any) -> float:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return _print(get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))


# --- new values -----------------------------------------------------------------------------------


def _reset(module: nn.Module) -> None:
    """Write a module's own parameters, as GPT-2 does for layers off the residual stream."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def _our_init(**options: Any) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        import funcshard as fs

        module, plan, mesh = _planned(place)

        def turn() -> float | None:
            torch.manual_seed(0)
            with place.timed():
                shards, _ = fs.init_module(module, plan, mesh, reset=_reset, **options)
            return None if options else _print(fs.to_state_dict(shards, plan, mesh))

        return turn

    return make


def _their_init(place: Place) -> Turn:
    def turn() -> None:
        module = _theirs_on_meta(place)
        torch.manual_seed(place.rank)
        with place.timed(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DTensor warns that ranks draw without a common generator
            module.to_empty(device="cpu")
            for each in module.modules():
                _reset(each)

    return turn


def _their_same_init(place: Place) -> Turn:
    """Rank 0 writes the values of the whole model and broadcasts them; the values are those of ours."""

    def turn() -> float:
        module, whole = _theirs_on_meta(place), on_meta(gpt(place, _MILLIONS))
        torch.manual_seed(0)

        def draw() -> dict[str, Any]:
            module = whole.to_empty(device="cpu")
            module.head.weight = module.token.weight
            return module.apply(_reset).state_dict()

        with place.timed(), torch.no_grad():
            _set_from_rank_0(place, module, draw)
        return _print_theirs(module)

    return turn


# --- values of a Hugging Face folder --------------------------------------------------------------


def _write(place: Place) -> None:
    """Write the model as ``save_pretrained`` does: several files and an index."""
    from safetensors.torch import save_file

    if place.rank:
        return
    (folder := place.directory / "hf").mkdir()
    state = gpt(place, _MILLIONS).module().state_dict()
    names = [name for name in state if name != "head.weight"]
    where = {}
    for i in range(_FILES):
        file = f"model-{i + 1:05}-of-{_FILES:05}.safetensors"
        part = names[i * len(names) // _FILES : (i + 1) * len(names) // _FILES]
        save_file({name: state[name].contiguous() for name in part}, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file))
    total = sum(state[name].nbytes for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _our_load(place: Place) -> Turn:
    import funcshard as fs

    _, plan, mesh = _planned(place)
    return place.turn(
        lambda: fs.import_safetensors(place.directory / "hf", plan, mesh),
        lambda shards: _print(fs.to_state_dict(shards, plan, mesh)),
    )


def _their_load(place: Place) -> Turn:
    """Rank 0 reads the files and broadcasts them."""
    from safetensors.torch import load_file

    def read() -> dict[str, Any]:
        state: dict[str, Any] = {}
        for file in sorted((place.directory / "hf").glob("*.safetensors")):
            state |= load_file(file)
        return {**state, "head.weight": state["token.weight"]}

    def turn() -> float:
        module = _theirs_on_meta(place)
        with place.timed():
            _set_from_rank_0(place, module, read)
        return _print_theirs(module)

    return turn


_INIT, _LOAD = "initialise: meta to shards, GPT, 98 M", "load a Hugging Face folder to shards, GPT, 98 M"
_RESET, _SAME = "FSDP2, to_empty and reset, other values on each rank", "FSDP2, the same values from rank 0"
_BROADCAST = "FSDP2, set_model_state_dict from rank 0"
CASES = (
    Case("init-blocks", f"{_INIT}, `draws='blocks'`", _RESET, 0.8, _our_init(draws="blocks"), _their_init, ranks=(2, 4)),
    Case("init", _INIT, _RESET, 0.8, _our_init(), _their_init, ranks=(2, 4)),
    Case("init-same", _INIT, _SAME, 0.8, _our_init(), _their_same_init, ranks=(2, 4)),
    Case("load", _LOAD, _BROADCAST, 0.7, _our_load, _their_load, before=_write),
    Case(
        "load-memory", f"{_LOAD}, peak", _BROADCAST, 0.7, _our_load, _their_load, before=_write,
        measure="bytes",
    ),
)  # fmt: skip
