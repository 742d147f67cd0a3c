"""Hugging Face's models: built on meta from a folder, and their names in files.

transformers keeps some tensors in another form in files than in modules, such as the experts of
Mixtral. Its own tables of conversions serve here, one tensor after another.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from funcshard._utils.regular_files import regular_size
from funcshard.checkpoint.folders import what_it_holds
from funcshard.checkpoint.rank_files import Header, headers_of
from funcshard.checkpoint.stored_state import Tensors
from funcshard.module import Functional
from funcshard.plan import Plan

_MOST_LAYERS = 100_000
_ITSELF = "the model itself, on meta, or its MODULE:CALLABLE to funcshard plan"


def is_hugging_face(module: Any) -> bool:
    """Return whether a module is a ``PreTrainedModel``, without importing transformers."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(module).__mro__
    )


def check_functional(caller: str, apply: Any) -> None:
    """Raise ``TypeError`` unless ``apply`` is the function of a model of Hugging Face."""
    if isinstance(apply, Functional) and is_hugging_face(apply.skeleton.template):
        return
    apply_type = type(apply).__name__
    remedy = "pass the apply of from_pretrained or make_functional, before the shards"
    if isinstance(apply, Functional):
        apply_type = type(apply.skeleton.template).__name__
        remedy = "export_safetensors writes the parameters of any module"
    raise TypeError(
        f"{caller} takes the apply of a model of Hugging Face; found {apply_type}: {remedy}"
    )


def build_on_meta(folder: Path, model: Any, dtype: torch.dtype | None) -> nn.Module:
    """Return the model of a folder, on the meta device and in evaluation mode.

    Arguments:
        folder: a folder with a ``config.json``, unless ``model`` is a module.
        model: the model's class, a module on meta, or ``None`` for the config's class.
        dtype: dtype of its floating-point parameters, or ``None`` for the config's.
    """
    if isinstance(model, nn.Module):
        # Note: values would be lost, because shards are made of the files alone.
        real_names = [
            name for name, parameter in model.named_parameters() if not parameter.is_meta
        ]
        if real_names:
            raise ValueError(
                f"model must have all parameters on meta; found {real_names[0]!r} with values: build it "
                "under torch.device('meta'), or shard its own values with shard(params, plan, "
                "mesh)"
            )
        # Why a copy: the caller's module keeps its dtypes and its mode.
        return _in_dtype(copy.deepcopy(model), dtype).eval()
    # Note: transformers would take the path for a name on the hub, and download it.
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}; from_pretrained reads local folders: download a model "
            "of the hub first, as in huggingface_hub.snapshot_download(name)"
        )
    file = folder / "config.json"
    if not file.exists():
        remedy = what_it_holds(folder)
        if any(folder.glob("model*.safetensors*")):
            remedy = "pass the model, built under torch.device('meta')"
        raise FileNotFoundError(f"{folder} has no config.json: {remedy}")
    config = _read_config(file)
    # Note: shards are flat, and a quantized tensor has scales beside its elements.
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"the weights in {folder} are quantized, and shards hold plain tensors: load the model "
            "with dequantize=True in its quantization_config, or call model.dequantize(), and "
            "write it with model.save_pretrained(another_folder)"
        )
    module = _of_config(file, config, model)
    return _in_dtype(module, dtype or getattr(config, "dtype", None)).eval()


def module_of_config(path: Path) -> nn.Module:
    """Return the model of a ``config.json``, on the meta device, in training mode.

    Parameters are in torch's default dtype. It reads no weights, so they may be missing or
    quantized. Without ``architectures``, you get the class that usually trains such a model.

    Arguments:
        path: the file, or its folder.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: transformers isn't installed.
        ValueError: the file isn't a configuration that transformers takes, or needs code of its
            folder.
    """
    file = path / "config.json" if path.is_dir() else path
    return _of_config(file, _read_config(file)).train()


def _of_config(file: Path, config: Any, model: Any = None) -> nn.Module:
    """Return the module of a config on meta; ``model`` is its class, by default the usual one."""
    cls = model or _class_of(config, file)
    try:
        with torch.device("meta"):
            module: Any = cls(config)
        module.tie_weights()
    except (
        Exception
    ) as error:  # of any kind: the code of the model takes any value of the config
        raise _unfit(file, cls.__name__, error) from error
    return module


def _class_of(config: Any, file: Path) -> Any:
    """Return the class that a config names, or else one that trains its model."""
    transformers = _transformers()
    if config.architectures:
        # Note: the first one is the class that wrote the folder.
        cls = getattr(transformers, str(config.architectures[0]), None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
        raise ValueError(
            f"{file} must name a class of transformers {transformers.__version__} among its "
            f"architectures; found {config.architectures}: pass {_ITSELF}"
        )
    auto_models = importlib.import_module("transformers.models.auto.modeling_auto")
    # Why masked ones first: BERT is among the causal models too, as a decoder.
    tasks = ["MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION"]
    if config.is_encoder_decoder:
        tasks = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"]
    for task in tasks:
        mapping = getattr(auto_models, f"MODEL_FOR_{task}_MAPPING")
        if type(config) in mapping:
            classes = mapping[type(config)]
            return classes[0] if isinstance(classes, tuple) else classes
    return auto_models.MODEL_MAPPING[type(config)]


def _read_config(file: Path) -> Any:
    if not file.exists():
        raise FileNotFoundError(
            f"there is no {file}: pass a config.json, or a folder with one"
        )
    regular_size(file)  # raises at a pipe, which transformers would wait for
    # Note: from a folder, transformers also reads the adapter's files.
    source = file.parent if file.name == "config.json" else file
    transformers = _transformers()
    try:
        # Why no trust: else transformers asks at the terminal whether to run code of the folder.
        config = transformers.AutoConfig.from_pretrained(
            source, local_files_only=True, trust_remote_code=False
        )
        layer_count = int(getattr(config, "num_hidden_layers", None) or 0)
    except Exception as error:  # of any kind: transformers takes any JSON
        raise _unfit(file, "transformers", error) from error
    # Why a bound: a model is built layer by layer, and damage may have changed their number.
    if layer_count > _MOST_LAYERS:
        raise ValueError(
            f"{file} must have at most {_MOST_LAYERS} layers; found {layer_count}: "
            "download it again"
        )
    return config


def _unfit(file: Path, taker: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return ValueError(
            f"{taker} needs a package that isn't installed ({reason}): install it"
        )
    return ValueError(
        f"{file} isn't a configuration that {taker} takes ({type(error).__name__}: "
        f"{reason}): download the folder again, or pass {_ITSELF}"
    )


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
        importlib.import_module("transformers.core_model_loading")
    except ImportError as error:
        raise ImportError(
            "models of Hugging Face need transformers 5 or newer: pip install 'transformers>=5'"
        ) from error
    return transformers


def _in_dtype(module: nn.Module, dtype: Any) -> nn.Module:
    """Convert a module's floating-point parameters and stored buffers in place."""
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None:
        return module
    # Note: transformers names the modules that keep float32: some under any smaller dtype, others
    # under float16 alone, whose range is small.
    name_patterns: set[str] = set()
    if dtype.itemsize < 4:
        name_patterns |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        name_patterns |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    in_float32 = re.compile("|".join(name_patterns).replace("*", ".*") or "(?!)")
    stored_names = module.state_dict().keys()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta and tensor.is_floating_point() and name in stored_names:
            tensor.data = tensor.data.to(
                torch.float32 if in_float32.search(name) else dtype
            )
    if hasattr(module, "config"):
        module.config.dtype = dtype
    return module


def embedding_names(module: Any) -> set[str]:
    """Return the names of the parameters that have a row for each token."""
    parameter_ids = {
        id(parameter) for end in _ends(module) for parameter in end.parameters()
    }
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in parameter_ids}


def default_units(module: nn.Module, *, ends: bool = False) -> list[str]:
    """Return the paths of a model's layers: the modules in its outermost lists.

    Arguments:
        module: the model.
        ends: whether to add the embedding and the head of a model of Hugging Face.
    """
    whole_classes = set(getattr(module, "_no_split_modules", None) or ())
    end_modules = _ends(module) if ends else []
    unit_modules: dict[str, nn.Module] = {}
    for path, submodule in module.named_modules():
        is_layer = path.rpartition(".")[2].isdecimal()
        # Note: a model of Hugging Face says which modules must not be split.
        if whole_classes:
            is_layer = path != "" and type(submodule).__name__ in whole_classes
        is_inside = any(path.startswith(f"{unit_path}.") for unit_path in unit_modules)
        if not is_inside and (is_layer or submodule in end_modules):
            unit_modules[path] = submodule
    # Note: a unit must gather all uses of a parameter, and a tied one has uses elsewhere.
    names_of: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return [
        path
        for path, submodule in unit_modules.items()
        if (parameters := list(submodule.parameters()))
        and all(name.startswith(f"{path}.") for p in parameters for name in names_of[id(p)])
    ]


def _ends(module: Any) -> list[nn.Module]:
    """Return the embedding and the head of a model of Hugging Face."""
    if not is_hugging_face(module):
        return []
    ends = [module.get_output_embeddings()]
    # Why: transformers raises it for models that embed no tokens, such as Wav2Vec2.
    with contextlib.suppress(NotImplementedError):
        ends.append(module.get_input_embeddings())
    return [end for end in ends if isinstance(end, nn.Module)]


# --- names in files -------------------------------------------------------------------------------


def read_names(
    module: nn.Module, tensors: Tensors
) -> Iterator[tuple[Tensors, Sequence[torch.Tensor]]]:
    """Yield the tensors of files in the module's names and form, with their source tensors."""
    # Note: under adapters, one tensor of the files may be for several modules.
    names, base = file_names(module), base_model(module)
    if (
        base is not module
    ):  # files of the model with its adapters have the module's own names
        exact_names = module.state_dict().keys() & tensors.keys()
        yield from (
            ({name: tensors[name]}, [tensors[name]])
            for name in tensors
            if name in exact_names
        )
        tensors = {
            name: tensor for name, tensor in tensors.items() if name not in exact_names
        }
    for read, sources in _read_base(base, names, tensors):
        yield (
            {
                name: tensor
                for plain_name, tensor in read.items()
                for name in names[plain_name]
            },
            sources,
        )
        del read  # before the next tensor is converted


def _read_base(
    module: nn.Module, names: Mapping[str, Any], tensors: Tensors
) -> Iterator[tuple[Tensors, Sequence[torch.Tensor]]]:
    """Yield the tensors of files under ``names``, those of a model without adapters."""
    if not is_hugging_face(module):
        yield from (
            ({name: tensor}, [tensor]) for name, tensor in tensors.items() if name in names
        )
        return
    loading = importlib.import_module("transformers.core_model_loading")
    conversion_entries = importlib.import_module(
        "transformers.conversion_mapping"
    ).get_model_conversion_mapping(module)
    renamings = [
        entry for entry in conversion_entries if isinstance(entry, loading.WeightRenaming)
    ]
    converters = [
        entry for entry in conversion_entries if isinstance(entry, loading.WeightConverter)
    ]
    converter_of = {
        pattern: entry for entry in converters for pattern in entry.source_patterns
    }
    prefix: Any = module.base_model_prefix
    pending_converters: dict[str, Any] = {}
    source_tensors: dict[str, list[torch.Tensor]] = {}
    # Why this order: a converter joins tensors as they come, so expert 2 before 10.
    for name in sorted(tensors, key=loading.dot_natural_key):
        # Note: transformers' own tables say which names and tensors become which.
        target, pattern = loading.rename_source_key(
            name, renamings, converters, prefix, names
        )
        if target not in names and name in names:
            # Note: a file of the module's own state dict needs no conversion.
            target, pattern = name, None
        if target in names and pattern is None:
            yield {target: tensors[name]}, [tensors[name]]
        elif target in names:
            # Why a copy: a converter collects in itself the tensors of one target.
            target_converter = pending_converters.setdefault(
                target, copy.deepcopy(converter_of[pattern])
            )
            target_converter.add_tensor(target, name, pattern, tensors[name])
            source_tensors.setdefault(target, []).append(tensors[name])
    # No name here refers to a tensor, so it is freed once it has been copied.
    for target in list(pending_converters):
        yield (
            _converted(pending_converters.pop(target), target, module),
            source_tensors.pop(target),
        )


def _converted(converter: Any, target: str, module: Any) -> Tensors:
    converted_tensors = converter.convert(target, model=module, config=module.config)
    if isinstance(converted_tensors, tuple):  # with the errors, in version 5.0
        converted_tensors = converted_tensors[0]
    return {
        name: value[0] if isinstance(value, list) else value
        for name, value in converted_tensors.items()
    }


def stored(module: nn.Module | None, tensors: Tensors) -> Tensors:
    """Return tensors of the module's state dict, also on meta, as files hold them."""
    if not is_hugging_face(module):
        return dict(tensors)
    core_loading = importlib.import_module("transformers.core_model_loading")
    stored_tensors: Tensors = core_loading.revert_weight_conversion(module, dict(tensors))
    return stored_tensors


def stored_entries(module: nn.Module | None, plan: Plan) -> list[list[Header]]:
    """Return the tensors that the files hold, for the leaves of each unit."""
    entry_groups: list[list[Header]] = []
    meta_leaves: Tensors = {}
    for unit in plan.unit_list:
        # Note: on meta, names and shapes in files are known before anything is gathered.
        unit_leaves = {
            leaf.path: torch.empty(
                leaf.model_shape, dtype=buffer.model_dtype, device="meta"
            )
            for buffer in unit.buffers
            for leaf in buffer.leaves
        }
        entry_groups.append(headers_of(stored(module, unit_leaves)))
        meta_leaves |= unit_leaves
    # Why all at once too: a tensor of the files may be made of leaves that lie in several units.
    whole_entries = headers_of(stored(module, meta_leaves))
    split_entries = {*whole_entries}.difference(*entry_groups)
    if split_entries:
        raise ValueError(
            f"the files hold {min(split_entries).name!r} as one tensor, whose parts lie in several units of "
            "the plan: save under a plan of whole layers, which from_pretrained makes by default"
        )
    return entry_groups


def write_config(folder: Path, module: Any, dtype: torch.dtype | None) -> None:
    """Write ``config.json``, and the configuration of generation if there is one."""
    # Note: the module's own config keeps the dtype that the model computes in.
    config = copy.deepcopy(module.config)
    # Note: AutoModel finds the class by it.
    config.architectures = [type(module).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    if getattr(module, "generation_config", None) is not None and module.can_generate():
        module.generation_config.save_pretrained(folder)


# --- adapters of peft ---------------------------------------------------------------------------

# What peft adds to the names of the model's own tensors.
_WRAPPERS = re.compile(r"(?<![^.])(base_layer|original_module|modules_to_save\.[^.]+)\.")


def base_model(module: nn.Module) -> nn.Module:
    """Return the model inside a ``PeftModel``, or the module itself."""
    is_peft_model = any(
        cls.__name__ == "PeftModel" and cls.__module__.startswith("peft.")
        for cls in type(module).__mro__
    )
    base: Any = module
    return base.get_base_model() if is_peft_model else base


def file_names(module: nn.Module) -> dict[str, list[str]]:
    """Return the module's own names for each name in a folder of the model under its adapters."""
    base, module_state = base_model(module), module.state_dict(keep_vars=True)
    prefix = next(
        f"{path}." if path else "" for path, m in module.named_modules() if m is base
    )
    # Note: inject_adapter_in_model leaves peft_config too, without a PeftModel.
    configs = getattr(module, "peft_config", {}).values()
    adapter_prefixes = {f".{_prefix_of(config)}" for config in configs}
    names: dict[str, list[str]] = {}
    for name in module_state:
        plain_name = name.removeprefix(prefix)
        if configs:
            is_adapter = any(adapter_prefix in name for adapter_prefix in adapter_prefixes)
            if is_adapter or not name.startswith(prefix):
                continue
            # Note: a module that peft copies to train it, as for ``modules_to_save``, has the
            # original's values.
            plain_name = _WRAPPERS.sub("", plain_name)
        names.setdefault(plain_name, []).append(name)
    # Why: of a tied parameter the folder may hold one name alone, and peft's copy is not tied.
    # So each name in the folder stands for all names of the tensors that it gives values to.
    names_of_parameter: dict[int, list[str]] = {}
    for tied_names in names.values():
        for parameter_id in {id(module_state[name]) for name in tied_names}:
            names_of_parameter.setdefault(parameter_id, []).extend(tied_names)
    for plain_name, tied_names in names.items():
        linked_names = [names_of_parameter[id(module_state[name])] for name in tied_names]
        names[plain_name] = list(dict.fromkeys(itertools.chain(tied_names, *linked_names)))
    return names


def _prefix_of(config: Any) -> str:
    """Return how the names of an adapter's tensors begin, e.g. ``lora_``."""
    mapping: Any = importlib.import_module("peft.mapping")
    prefix: str = mapping.PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type]
    return prefix


def adapter_reset(module: nn.Module) -> Callable[[nn.Module], None]:
    """Return ``reset(m)``, which gives peft's initial values to the adapters of LoRA and IA3.

    Raise ``ValueError`` for others, and if peft computes their values from weights.
    """
    configs: Any = getattr(module, "peft_config", {})
    for config in configs.values():
        # Note: an enumeration in some versions of peft, and a text in others.
        peft_type = str(getattr(config.peft_type, "value", config.peft_type))
        init = getattr(config, "init_lora_weights", None)
        is_drawn = init in (True, False, "gaussian") and not getattr(
            config, "use_dora", False
        )
        is_supported = (
            is_drawn
            if peft_type == "LORA"
            else peft_type == "IA3" and config.init_ia3_weights
        )
        if not is_supported:
            raise ValueError(
                "from_pretrained initialises adapters of IA3, and those of LoRA that do not "
                f"depend on the weights; found {type(config).__name__}: call get_peft_model on a "
                "model with values, and shard its params"
            )

    def reset(m: Any) -> None:
        # Note: only layers without children have values of their own.
        if not m._modules and hasattr(m, "reset_parameters"):
            m.reset_parameters()  # as at its construction; init_lora_weights=False keeps these values
        for name, config in configs.items():
            if hasattr(m, "reset_lora_parameters"):
                m.reset_lora_parameters(name, config.init_lora_weights)
            elif hasattr(m, "reset_ia3_parameters"):
                m.reset_ia3_parameters(name)

    return reset
