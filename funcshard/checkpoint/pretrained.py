"""``from_pretrained`` and ``save_pretrained``: Hugging Face's folders to shards, and back.

Files are mapped into memory, and each rank copies its own part of every tensor. A tensor in another
form is converted by itself and freed, so no rank ever holds the whole model.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from funcshard._utils.options import check_flag, check_path, did_you_mean
from funcshard._utils.regular_files import release_pages
from funcshard._utils.torch_private import callers_level
from funcshard.checkpoint.folders import StrPath
from funcshard.checkpoint.hugging_face import (
    adapter_reset,
    build_on_meta,
    check_functional,
    default_units,
    embedding_names,
    file_names,
    read_names,
    write_config,
)
from funcshard.checkpoint.safetensors import (
    COMPARED,
    export_model,
    open_tensors,
)
from funcshard.checkpoint.state_dict import check_floating
from funcshard.checkpoint.stored_state import (
    LeafPlace,
    Tensors,
    by_buffer,
    each_leaf,
    leaves_by_name,
)
from funcshard.comm import Mesh
from funcshard.core import (
    LeafChecksums,
    Shards,
    check_leaf,
    check_mesh,
    empty_shard,
    on_every_rank,
    put_whole,
)
from funcshard.module import Functional, init_buffers, init_missing, make_functional
from funcshard.plan import Plan, make_plan
from funcshard.train import TrainState

# By path: a leaf of the rows that the files hold, and these rows.
_Grown = dict[str, tuple[LeafPlace, torch.Tensor]]


class Pretrained(NamedTuple):
    """A model that ``from_pretrained`` loaded.

    Attributes:
        apply: the model's function, as from ``make_functional``, in evaluation mode.
        shards: this rank's shards.
        buffers: the buffers, on the mesh's device.
        plan: the plan of the shards.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params, mesh = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}, fs.Mesh()
        >>> plan = fs.make_plan(params, mesh)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fs.export_safetensors(folder, fs.shard(params, plan, mesh), plan, mesh)
        ...     model = torch.nn.Linear(2, 1, device="meta")
        ...     loaded = fs.from_pretrained(folder, mesh, model=model)
        >>> sharded = fs.fully_shard(loaded.apply, loaded.plan, mesh)
        >>> sharded(loaded.shards, loaded.buffers, torch.ones(1, 2)).item()
        3.0
    """

    apply: Functional
    shards: Shards
    buffers: dict[str, torch.Tensor]
    plan: Plan


def from_pretrained(
    path: StrPath,
    mesh: Mesh,
    *,
    model: type[nn.Module] | nn.Module | None = None,
    dtype: torch.dtype | None = None,
    mutable: bool = False,
    plan: Plan | None = None,
    **options: Any,
) -> Pretrained:
    """Load your folder of Hugging Face into shards; ``save_pretrained`` is the inverse.

    Each rank reads its own part of every tensor, so none holds the whole model. The function is in
    evaluation mode: pass ``apply.train()`` to ``fully_shard`` to train with dropout.

    Parameters that the files lack, such as a new head or the rows of added tokens, get the model's
    initial values, and a warning names them. Adapters of peft get peft's. docs/hugging-face.md has
    more cases.

    Arguments:
        path: a local folder with ``config.json`` and the model's safetensors files.
        mesh: the ranks.
        model: your model's class, or a module on the meta device with the files' names, also with
            adapters. By default the class that ``config.json`` names.
        dtype: dtype of the parameters, by default that of the config or module. To train in
            bfloat16 you usually keep float32 parameters: pass ``torch.float32`` and
            ``precision=fs.MixedPrecision(param_dtype=torch.bfloat16)``.
        mutable: as in ``make_functional``.
        plan: a plan of this model's params, in place of ``options``.
        options: options of ``make_plan``; by default the model's layers are the ``units``.

    Returns:
        ``(apply, shards, buffers, plan)``, a ``Pretrained``.

    Raises:
        ImportError: transformers is missing, or older than version 5.
        FileNotFoundError: there is no such folder, or it lacks ``config.json`` or the files.
        TypeError: an option has the wrong type, or you pass a plan and options.
        ValueError: the config names no class of transformers; the weights are quantized; a tensor
            has another shape than in the model; the files hold no parameter of it, or different
            values of a tied one; or ranks find different files. If one rank fails, every rank
            raises.

    Example:
        >>> import tempfile, torch, transformers, funcshard as fs
        >>> config = transformers.GPT2Config(
        ...     vocab_size=9, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        >>> def main(mesh, folder):
        ...     apply, shards, buffers, plan = fs.from_pretrained(folder, mesh)
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     return sharded(shards, buffers, torch.tensor([[1, 2, 3]])).logits
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = transformers.GPT2LMHeadModel(config)
        ...     model.save_pretrained(folder)
        ...     logits = fs.simulate(lambda mesh: main(mesh, folder), world_size=2)[0]
        >>> torch.equal(logits, model.eval()(torch.tensor([[1, 2, 3]])).logits)
        True

    Source: ``transformers.AutoModel.from_pretrained``.
    """
    folder = check_path("path", path)
    check_flag("mutable", mutable)
    check_floating("dtype", dtype)
    if not (
        model is None
        or isinstance(model, nn.Module)
        or (isinstance(model, type) and issubclass(model, nn.Module))
    ):
        raise TypeError(
            f"model must be a class of modules, a module on meta, or None; found {model!r}: pass "
            "the model's own class, such as transformers.LlamaForCausalLM, or leave it out for "
            "the class that config.json names"
        )
    own_options = [
        "model",
        "dtype",
        "mutable",
        "plan",
        *inspect.signature(make_plan).parameters,
    ]
    if unknown_options := sorted(options.keys() - set(own_options)):
        own_text = "its own are model, dtype, mutable and plan, all others make_plan's"
        raise TypeError(
            f"from_pretrained has no option {unknown_options[0]!r}: "
            f"{did_you_mean(unknown_options[0], own_options, otherwise=own_text)}"
        )
    if plan is not None and options:
        raise TypeError(
            "from_pretrained takes a plan or options of make_plan; found a plan and "
            f"{sorted(options)[0]!r}"
        )
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a Mesh, as from init_mesh(); found {type(mesh).__name__}"
        )
    with on_every_rank(mesh):
        module = build_on_meta(folder, model, dtype)
        apply, params, buffers = make_functional(module, mutable)
        # Note: on meta, so a plan of any model is made without memory for it.
        plan = plan or make_plan(
            params, mesh, **{"units": default_units(module), **options}
        )
    assert plan is not None, "a rank without a plan raises above"
    check_mesh(plan, mesh)
    # Note: ranks on several machines may have other files under the same path.
    checksums = LeafChecksums(mesh, str(path), "give every rank the same files")
    shards = by_buffer(plan, lambda unit, buffer: empty_shard(unit, buffer, mesh))
    with on_every_rank(mesh, checksums):
        if wrong_paths := sorted({leaf.path for leaf in plan.leaves} ^ params.keys()):
            raise ValueError(
                f"the plan was made for another model, which differs in {wrong_paths[:3]}: make it "
                "from make_functional's params of this model on meta, or leave plan out"
            )
        tensors = open_tensors(folder)
        for name, tensor in tensors.items():
            checksums.add(name, tensor.view(-1)[: COMPARED // tensor.itemsize])
        unread_paths, grown_embeddings, read_buffers = _read(
            module, tensors, shards, plan, mesh, folder
        )
        # Note: adapters are never in a folder of the model, so they are no missing parameters.
        in_files = {name for names in file_names(module).values() for name in names}
        adapter_paths = [path for path in unread_paths if path not in in_files]
        missing_paths = [path for path in unread_paths if path in in_files]
        reset = adapter_reset(module) if adapter_paths else None
        initial_buffers = init_buffers(module, mesh)
        buffers = {name: read_buffers.get(name, initial_buffers[name]) for name in buffers}
    if missing_paths := [*missing_paths, *grown_embeddings]:
        warnings.warn(
            f"{path} lacks {len(missing_paths)} of the model's {len(plan.leaves)} parameters, or rows of "
            f"them, such as {missing_paths[:3]}: they begin with the model's initial values",
            stacklevel=callers_level(),
        )
        init_missing(module, plan, mesh, shards, missing_paths)
    # Note: all rows have initial values now, and the rows of the files replace theirs.
    for (unit, buffer, stored_rows), tensor in grown_embeddings.values():
        put_whole(shards[unit.name][buffer.key], tensor, stored_rows, buffer, mesh)
    if adapter_paths:
        init_missing(module, plan, mesh, shards, adapter_paths, reset)
    return Pretrained(apply, shards, buffers, plan)


def _read(
    module: nn.Module,
    tensors: Tensors,
    shards: Shards,
    plan: Plan,
    mesh: Mesh,
    folder: Path,
) -> tuple[list[str], _Grown, Tensors]:
    """Copy this rank's part of each tensor into its shard.

    Returns:
        Paths of leaves that no file has; embeddings of fewer tokens, which aren't copied; buffers.
    """
    embedding_paths = embedding_names(module)
    grown_embeddings: _Grown = {}
    place_of = leaves_by_name(plan)
    first_of_tied: dict[str, tuple[str, torch.Tensor]] = {}
    read_paths: set[str] = set()
    read_buffers: dict[str, torch.Tensor] = {}
    for read_name, sources in read_names(module, tensors):
        for name, tensor in read_name.items():
            # Note: read_names yields names of the state dict, so others are buffers.
            if name not in place_of:
                read_buffers[name] = tensor.to(module.get_buffer(name).dtype).to(
                    mesh.device, copy=True
                )
                continue
            # Note: embeddings may have got tokens since the files were written.
            unit, buffer, leaf = place_of[name]
            adds_rows = (
                name in embedding_paths
                and not leaf.cuts
                and buffer.packing is None
                and tensor.shape[1:] == leaf.model_shape[1:]
                and tensor.shape[:1] < leaf.model_shape[:1]
            )
            # Why so: the rows of the file are the first elements of the leaf.
            stored_rows = (
                dataclasses.replace(leaf, shape=tuple(tensor.shape)) if adds_rows else leaf
            )
            check_leaf(tensor, stored_rows, buffer, str(folder), whole=True, cast=True)
            if leaf.aliases:
                # Note: files may hold a tied parameter twice; then both have to be equal.
                first, value = first_of_tied.setdefault(leaf.path, (name, tensor))
                if first != name and not torch.equal(value, tensor):
                    raise ValueError(
                        f"{folder} holds different values of {first!r} and {name!r}, which the "
                        "model ties: set tie_word_embeddings to false in config.json, or pass a "
                        "model that does not tie them"
                    )
            if adds_rows:
                # Note: copied later, when all rows have initial values.
                grown_embeddings[leaf.path] = (unit, buffer, stored_rows), tensor
            else:
                put_whole(shards[unit.name][buffer.key], tensor, leaf, buffer, mesh)
            read_paths.add(leaf.path)
        for source in sources:  # the bytes that were copied need not stay beside the copy
            release_pages(source)
        del read_name, tensor  # before the next tensor is converted
    # Note: some are initialised, but if all are, the folder is of another model.
    missing_paths = [leaf.path for leaf in plan.leaves if leaf.path not in read_paths]
    if missing_paths and not read_paths:
        raise ValueError(
            f"{folder} holds no parameter of {type(module).__name__}; it has "
            f"{sorted(tensors)[:3]}, and the model {missing_paths[:3]}: it is of another model"
        )
    return missing_paths, grown_embeddings, read_buffers


# --- writing --------------------------------------------------------------------------------------


def save_pretrained(
    path: StrPath,
    apply: Functional,
    state: TrainState | Shards,
    plan: Plan,
    mesh: Mesh,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write a folder that ``AutoModel.from_pretrained`` loads; ``from_pretrained`` is the inverse.

    You have to call it on every rank. One unit after another is gathered, converted, and written by
    rank 0. The folder also gets ``config.json``. Save your tokenizer with its own method.

    Arguments:
        path: the folder to write.
        apply: the function that you got from ``from_pretrained`` or ``make_functional``.
        state: your ``TrainState``, for parameters and persistent buffers; or shards, for parameters
            alone.
        plan: the plan of your shards.
        mesh: the ranks.
        max_shard_size: as in ``export_safetensors``.
        dtype: as in ``export_safetensors``.

    Returns:
        The paths of the files that hold tensors, on every rank.

    Raises:
        TypeError: ``apply`` isn't of a model of Hugging Face, or an option has the wrong type.
        ValueError: the shards don't match the plan; a leaf is local to each rank; or one tensor of
            the files lies in several units.
        OSError: rank 0 can't write the files. Every rank raises it.

    Example:
        >>> import tempfile, torch, transformers, funcshard as fs
        >>> config = transformers.GPT2Config(
        ...     vocab_size=9, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        >>> apply, params, buffers = fs.make_functional(transformers.GPT2LMHeadModel(config))
        >>> plan, mesh = fs.make_plan(params, 1), fs.Mesh()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state = fs.TrainState(fs.shard(params, plan, mesh), buffers)
        ...     _ = fs.save_pretrained(folder, apply, state, plan, mesh)
        ...     type(transformers.AutoModelForCausalLM.from_pretrained(folder)).__name__
        'GPT2LMHeadModel'

    Source: ``transformers.PreTrainedModel.save_pretrained``.
    """
    check_functional("save_pretrained", apply)
    folder = check_path("path", path)
    shards: Any = state
    extra_tensors = None
    if isinstance(state, TrainState):
        shards, extra_tensors = state.shards, apply.persistent(state.buffers)
    # Note: on meta; it has the class, the config and the names of tied parameters.
    module = apply.skeleton.template
    files = export_model(
        module, folder, shards, plan, mesh, extra_tensors, max_shard_size, dtype
    )
    dtypes = [
        b.model_dtype for _, b, _ in each_leaf(plan) if b.model_dtype.is_floating_point
    ]
    with on_every_rank(mesh):
        if mesh.rank == 0:
            write_config(folder, module, dtype or next(iter(dtypes), None))
    return files
