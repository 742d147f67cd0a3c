"""Names of state dicts against the state dicts of torch."""

import pytest
import torch
from torch import nn

from funcshard._utils.torch_modules import state_names


class Extra(nn.Linear):
    """A module with a state of its own in state dicts."""

    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        pass


def shared():
    inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    inner.register_buffer("kept", torch.ones(1))
    inner.register_buffer("lost", torch.ones(1), persistent=False)
    inner.register_buffer("none", None)
    return nn.ModuleDict({"a": inner, "b": nn.ModuleList([nn.Linear(1, 1), inner]), "c": nn.Identity()})


def hooked():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_state_dict_post_hook(lambda m, state, prefix, _: state.update({prefix + "more": torch.ones(1)}))
    return module


def hooked_before():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_state_dict_pre_hook(lambda m, prefix, keep: m.register_buffer("new", torch.ones(1)))
    return module


MODELS = {
    "a layer": lambda: nn.Linear(2, 3),
    "shared modules": shared,
    "extra state": lambda: nn.Sequential(Extra(2, 2)),
    "a hook": hooked,
    "a hook before": hooked_before,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_names_are_those_of_the_state_dict(model):
    module = model()
    every = list(module.named_modules(remove_duplicate=False))
    names = state_names(module, every, {type(m) for _, m in every})
    assert names == tuple(module.state_dict())
