"""Advice for calls of methods that a module has and a function lacks, such as ``eval()``.

``absent_of_apply`` and ``absent_of_sharded`` make the errors. A method of the module's own class,
such as ``generate``, is told by its name.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from funcshard._utils import absent

_CASTS = ("to", "cuda", "cpu", "half", "bfloat16", "float", "double")
_HOOK_METHODS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
)
_BEFORE = "the function has no parameters of its own: make_functional returned them as params"
_HOOKS = "register hooks on the module before make_functional"
_APPLY = {
    "parameters": _BEFORE,
    "named_parameters": _BEFORE,
    "state_dict": f"{_BEFORE}; call fs.to_state_dict(shards, plan, mesh) with shards",
    "load_state_dict": "call fs.from_state_dict(state_dict, plan, mesh), or load the module before make_functional",
    "requires_grad_": "call it on the module before make_functional",
    **dict.fromkeys(_HOOK_METHODS, _HOOKS),
    **dict.fromkeys(_CASTS, "call module.to(...) before make_functional"),
}
_SHARDS = "the parameters are the shards, which every call takes"
_CHECKPOINTING = "pass remat=True to fully_shard, or the names of units"
_SYNC = "pass accumulate= to make_train_step, or call fs.accumulate"
_SHARDED = {
    "eval": "call fully_shard(apply.eval(), plan, mesh), which takes the same shards",
    "train": "call fully_shard(apply.train(), plan, mesh), which takes the same shards",
    "parameters": _SHARDS,
    "named_parameters": _SHARDS,
    "zero_grad": "leave it out; value_and_grad returns new gradients each time",
    "state_dict": "call fs.to_state_dict(shards, plan, mesh)",
    "load_state_dict": "call shards = fs.from_state_dict(state_dict, plan, mesh)",
    "requires_grad_": "freeze parameters of the module before make_functional",
    **dict.fromkeys(_HOOK_METHODS, _HOOKS),
    "module": "the module is no part of it: fs.to_state_dict(shards, plan, mesh) is for module.load_state_dict",
    "compile": "pass compiler=torch.compile to fully_shard",
    "no_sync": _SYNC,
    "set_requires_gradient_sync": _SYNC,
    "clip_grad_norm_": "pass max_norm= to make_train_step, or call fs.clip_by_global_norm",
    "unshard": "fs.gather(shards, plan, mesh) returns the whole parameters",
    "save_pretrained": "call fs.save_pretrained(folder, apply, shards, plan, mesh)",
    "gradient_checkpointing_enable": _CHECKPOINTING,
    "activation_checkpointing_enable": _CHECKPOINTING,
    **dict.fromkeys(
        _CASTS,
        "shards live where the mesh is: pass device= to init_mesh, and dtypes to "
        "make_plan(precision=)",
    ),
}


def absent_of_apply(name: str, cls: type | None) -> AttributeError:
    """Return the error for an attribute that a function of ``make_functional`` lacks.

    Arguments:
        name: the attribute.
        cls: the module's class, if it is known.
    """
    return absent(
        "a function of make_functional", name, _with_method(_APPLY, name, cls, "apply.method({!r})")
    )


def absent_of_sharded(name: str, cls: type | None) -> AttributeError:
    """Return the error for an attribute that a function of ``fully_shard`` lacks."""
    call = "fs.fully_shard(apply.method({!r}), plan, mesh)"
    return absent("a function of fully_shard", name, _with_method(_SHARDED, name, cls, call))


def _with_method(
    remedies: Mapping[str, str], name: str, cls: type | None, call: str
) -> Mapping[str, str]:
    """Return the advice, with one for a method of the module's class."""
    if (
        name in remedies
        or name.startswith("_")
        or hasattr(nn.Module, name)
        or not callable(getattr(cls, name, None))
    ):
        return remedies
    return {name: f"it is a method of the module, whose function is {call.format(name)}"}
