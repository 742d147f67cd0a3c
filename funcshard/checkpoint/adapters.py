"""Adapters of peft on a model on meta: the model's own names, and the adapters' first values.

peft puts a module into a wrapper: ``q_proj.weight`` becomes ``q_proj.base_layer.weight``. A folder
of the model has the names without wrappers.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable
from typing import Any

from torch import nn

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
    prefix = next(f"{path}." if path else "" for path, m in module.named_modules() if m is base)
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
        is_drawn = init in (True, False, "gaussian") and not getattr(config, "use_dora", False)
        is_supported = (
            is_drawn if peft_type == "LORA" else peft_type == "IA3" and config.init_ia3_weights
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
