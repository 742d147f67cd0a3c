"""Adapters of peft on a model on meta: the names of the model under them, and their first values.

peft puts a module into a wrapper, in its place: ``q_proj.weight`` is then
``q_proj.base_layer.weight``. A folder of the model has the names without the wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def base_model(module: nn.Module) -> nn.Module:
    """Return the model inside a ``PeftModel``, or the module itself."""
    of_peft = any(
        cls.__name__ == "PeftModel" and cls.__module__.startswith("peft.")
        for cls in type(module).__mro__
    )
    base: Any = module
    return base.get_base_model() if of_peft else base


def file_names(module: nn.Module) -> dict[str, list[str]]:
    """Return the names in a folder of the model under adapters, and for each the module's own.

    A module that peft copies to train it, as for ``modules_to_save``, has the values of the
    original. Adapters are left out.
    """
    base, state = base_model(module), module.state_dict(keep_vars=True)
    prefix = next(f"{path}." if path else "" for path, m in module.named_modules() if m is base)
    names: dict[str, list[str]] = {}
    for name in state:
        plain = _without_wrappers(base, name[len(prefix) :]) if name.startswith(prefix) else None
        if plain is not None:
            names.setdefault(plain, []).append(name)
    # Why: of a tied parameter the folder may hold one name alone, and peft's copy is not tied.
    tied: dict[int, list[str]] = {}
    for group in names.values():
        for key in {id(state[name]) for name in group}:
            tied.setdefault(key, []).extend(group)
    return {
        plain: list(dict.fromkeys([*group, *(k for name in group for k in tied[id(state[name])])]))
        for plain, group in names.items()
    }


def _without_wrappers(module: nn.Module, name: str) -> str | None:
    """Return the name that a tensor has without peft's wrappers; ``None`` if it is an adapter's."""
    key, _, inner_name = name.partition(".")
    child = module._modules.get(key)
    if not hasattr(type(module), "adapter_layer_names"):  # of all of peft's wrappers
        inner = None if child is None else _without_wrappers(child, inner_name)
        if child is None:
            return name
        return None if inner is None else f"{key}.{inner}"
    if child is not None and key == "modules_to_save":
        adapter, _, inner_name = inner_name.partition(".")
        child = child._modules[adapter]
    elif key not in ("base_layer", "original_module"):
        return None
    return None if child is None else _without_wrappers(child, inner_name)


def adapter_reset(module: nn.Module) -> Callable[[nn.Module], None]:
    """Return ``reset(m)``, which gives peft's initial values to the adapters of LoRA and IA3.

    Raises:
        ValueError: the adapters are of another kind, or begin with values that peft computes from
            the weights under them.
    """
    configs: Any = getattr(module, "peft_config", {})
    for config in configs.values():
        peft_type = str(getattr(config.peft_type, "value", config.peft_type))
        init = getattr(config, "init_lora_weights", None)
        drawn = init in (True, False, "gaussian") and not getattr(config, "use_dora", False)
        fits = drawn if peft_type == "LORA" else peft_type == "IA3" and config.init_ia3_weights
        if not fits:
            raise ValueError(
                "from_pretrained initialises adapters of IA3, and those of LoRA that do not "
                f"depend on the weights; found {type(config).__name__}: call get_peft_model on a "
                "model with values, and shard its params"
            )

    def reset(m: Any) -> None:
        if not m._modules and hasattr(m, "reset_parameters"):
            m.reset_parameters()  # as at its construction; init_lora_weights=False keeps these values
        for name, config in configs.items():
            if hasattr(m, "reset_lora_parameters"):
                m.reset_lora_parameters(name, config.init_lora_weights)
            elif hasattr(m, "reset_ia3_parameters"):
                m.reset_ia3_parameters(name)

    return reset
