"""A torch that lacks a private name costs a feature: the library is imported, and trains."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils.torch_names import NAMES, needed_for, private
from tests.hostile.nursery import needs_linux

PACKAGE = Path(fs.__file__).parent
PRIVATE = sorted((PACKAGE / "_utils").glob("torch_*.py"))  # ruff refuses private names of torch elsewhere
NAMESPACE = "torch._C._functorch"

# Imports torch once. Then a child for each batch of names imports the library as if torch had none of
# them, nor any in them, and takes two steps.
PROGRAM = """
import importlib.util, os, sys, traceback, warnings
import torch, torch._dynamo, torch.utils.flop_counter  # _dynamo: the first step of torch.optim imports it

package, *batches = sys.argv[1:]

def without(missing):
    path = package + "/_utils/torch_names.py"
    spec = importlib.util.spec_from_file_location("funcshard._utils.torch_names", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    look_up = module.look_up

    def find(name):
        if name in missing or name.startswith(tuple(each + "." for each in missing)):
            raise AttributeError(name)
        return look_up(name)

    module.look_up = find
    sys.modules[spec.name] = module

def train(fs):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x, mesh = torch.ones(2, 4), fs.init_mesh()
    net(x).square().mean().backward()
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["0", "2"])
    sharded = fs.fully_shard(apply, plan, mesh)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
    shards = fs.shard(params, plan, mesh)
    state = optimizer.init(shards)
    for step in range(2):
        _, grads = fs.value_and_grad(lambda shards: sharded(shards, buffers, x).square().mean())(shards)
        if step == 0:
            found = fs.to_state_dict(grads, plan, mesh)
            assert all(torch.equal(found[name], param.grad) for name, param in net.named_parameters())
        shards, state = optimizer.step(grads, state, shards)

def run(missing):
    without(missing)
    warnings.simplefilter("error")
    if {"torch._C._functorch", "torch._C._functorch.get_interpreter_stack"} & {*missing}:
        warnings.filterwarnings("ignore", "torch.func around sharded functions needs torch._C._functorch,")
    import funcshard as fs
    train(fs)

for batch in batches:
    print("batch", batch, flush=True)
    child = os.fork()
    if not child:
        code = 1
        try:
            run(batch.split(","))
            code = 0
        except BaseException:
            print("failed", traceback.format_exc(), flush=True)
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        print("failed", flush=True)
"""


@needs_linux
@pytest.mark.nightly
def test_without_private_names_of_torch_the_library_is_imported_and_trains() -> None:
    names, count = [*NAMES], 3
    # Why not neighbours together: some of them stand in for each other.
    batches = [*(",".join(names[number::count]) for number in range(count)), NAMESPACE]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(PACKAGE), *batches],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    told = {part.partition("\n")[0]: part.partition("\n")[2] for part in done.stdout.split("batch ")[1:]}
    assert [*told] == batches
    failed = {batch: text for batch, text in told.items() if "failed" in text}
    assert not failed, "\n".join(f"{batch}: {text}" for batch, text in failed.items())


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file that run when it is imported."""
    yield node
    inside = [*ast.iter_child_nodes(node)]
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        inside = node.orelse
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        inside = [node.args, *getattr(node, "decorator_list", [])]
    elif isinstance(node, ast.AnnAssign):
        inside = [part for part in (node.target, node.value) if part is not None]
    for child in inside:
        yield from at_import(child)


def private_names(node: ast.AST) -> list[str]:
    """Return the private names of torch in a node."""
    names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        names = [module + name.name for name in node.names]
    return [name for name in names if name.startswith("torch.") and "._" in name and "__" not in name]


def test_no_private_name_of_torch_is_used_while_the_library_is_imported() -> None:
    for file in PRIVATE:
        for node in at_import(ast.parse(file.read_text())):
            assert not private_names(node), f"{file}: {private_names(node)}; look it up with torch_names.private"


def test_at_most_21_private_names_of_torch_are_looked_up() -> None:
    # docs/design.md has the number.
    calls = [call for file in PACKAGE.rglob("*.py") for call in re.findall(r"\bprivate\(.*", file.read_text())]
    assert 10 < len(calls) <= 22, calls  # and its definition


def test_a_missing_name_raises_where_it_is_used_and_not_before() -> None:
    missing: Any = private("torch._C._no_such_name", "a feature")
    assert not isinstance(1, missing)
    words = rf"^a feature needs torch\._C\._no_such_name, which torch {re.escape(torch.__version__)} lacks: install a torch"

    class Mode(missing):  # type: ignore[misc]
        pass

    for use in (missing, lambda: missing(1, a=2), Mode):
        with pytest.raises(RuntimeError, match=words):
            use()


def test_a_missing_name_may_have_a_stand_in() -> None:
    assert private("torch._C._no_such_name", "a feature", 7) == 7
    assert private("torch._no_such_module.name", "a feature", None) is None
    assert private("torch._C._is_alias_of", "a feature", 7) is torch._C._is_alias_of  # type: ignore[attr-defined]
    del NAMES["torch._C._no_such_name"], NAMES["torch._no_such_module.name"]


def test_a_missing_import_names_the_feature() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^a feature needs No module named 'torch\._no_such'.*, which torch "),
        needed_for("a feature"),
    ):
        import torch._no_such  # noqa: F401
