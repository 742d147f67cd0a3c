"""The structure of the code: imports follow the layers, files stay small, and importing has no effects."""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOORS = (ROOT / "funcshard").glob("*/**/__init__.py")
WINGS = sorted(str(door.parent.relative_to(ROOT / "funcshard")) for door in DOORS if "demo" not in door.parts)

LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"

# Loads the heavy packages that funcshard needs first, so that the rest is loaded by funcshard
# itself.
IMPORTING = """
import json, sys, threading
import filelock, optree, safetensors, torch, torch.distributed.device_mesh, torch.distributed.fsdp, torch.func
import torch.distributed as dist
def tops():
    return {name.partition(".")[0] for name in sys.modules}
before = tops() | set(sys.stdlib_module_names)
import funcshard as fs
print(json.dumps(sorted(tops() - before)))
from funcshard.demo.gpt import GPT
assert not dist.is_initialized(), "a process group"
assert threading.active_count() == 1, threading.enumerate()

apply, params, buffers = fs.make_functional(torch.nn.Linear(2, 1))
plan, mesh = fs.make_plan(params, 1), fs.Mesh()
sharded, x = fs.fully_shard(apply, plan, mesh), torch.ones(1, 2)
fs.value_and_grad(lambda shards: sharded(shards, buffers, x).sum())(fs.shard(params, plan, mesh))
with torch.device("meta"):
    GPT()
assert "torch._dynamo" not in sys.modules, "it takes longer to import than the rest of torch"
"""


def python(code, house, **env):
    """Run ``code`` in a process that imports the package from the folder ``house``."""
    environment = {**os.environ, "PYTHONPATH": str(house), **env}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=house, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.fixture
def copied_house(tmp_path):
    shutil.copytree(ROOT / "funcshard", tmp_path / "funcshard", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_never_climb():
    done = python(LINT, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


# A file, a line that is planted at its end, and the linter's complaint.
PLANTED = {
    "an import that climbs": ("plan/wrap.py", "from funcshard.comm import Mesh", "funcshard.plan.wrap -> funcshard.comm"),
    "an import of the same floor": (
        "train/scaler.py", "from funcshard.module import fully_shard", "funcshard.train.scaler -> funcshard.module",
    ),
    "an import past a front door": (
        "core/unit.py", "from funcshard.comm.agreement import text_of", "funcshard.core.unit -> funcshard.comm.agreement",
    ),
    "an import past an inner door": (
        "comm/mesh.py", "from funcshard.comm.shm.pool import fits", "funcshard.comm.mesh -> funcshard.comm.shm.pool",
    ),
    "a cycle in a wing": (
        "plan/events.py", "from funcshard.plan.predict import predict_events", "No cycles are allowed in funcshard.plan.",
    ),
    "optree outside tree": ("plan/plan.py", "import optree", "funcshard.plan.plan -> optree"),
    "a file in no wing": ("attic.py", "x = 1", "attic"),
}  # fmt: skip


@pytest.mark.slow
def test_the_linter_sees_each_planted_fault(copied_house):
    for file, line, _ in PLANTED.values():
        with (copied_house / "funcshard" / file).open("a") as code:
            code.write(f"\n{line}\n")
    done = python(LINT, copied_house)
    assert done.returncode != 0
    assert {name for name, (*_, words) in PLANTED.items() if words not in done.stdout + done.stderr} == set()


PRIVATE = {
    "an attribute": "level = torch._C._functorch.maybe_get_level",
    "a module": "from torch._functorch.eager_transforms import jvp_increment_nesting",
    "a name of a module": "from torch._C import _current_graph_task_id",
    "a member of another object": "peek = lambda other: other._secret",
}


def test_style_refuses_private_names_outside_their_one_file(copied_house):
    for name, refused in (("core/unit.py", PRIVATE), ("_utils/torch_private.py", {})):
        path = copied_house / "funcshard" / name
        path.write_text("\n".join(["import torch", *PRIVATE.values(), ""]))
        command = [sys.executable, "-m", "ruff", "check", "--select", "SLF001,TID251", "--no-cache", str(path)]
        done = subprocess.run(command, cwd=copied_house, capture_output=True, text=True, timeout=60)
        lines = {int(line) for line in re.findall(r":(\d+):\d+$", done.stdout, re.MULTILINE)}
        assert lines == {number for number, _ in enumerate(refused, 2)}, done.stdout + done.stderr


@pytest.mark.parametrize("wing", WINGS)
def test_a_front_door_says_what_lives_there_file_by_file_and_exports_what_others_use(wing):
    door = importlib.import_module(f"funcshard.{wing.replace('/', '.')}")
    files = {path.stem for path in (ROOT / "funcshard" / wing).glob("*.py")} - {"__init__"}
    assert files <= set(re.findall(r"``(\w+)``", door.__doc__ or ""))
    assert all(hasattr(door, name) for name in getattr(door, "__all__", ()))


@pytest.mark.parametrize("wing", WINGS)
def test_a_file_of_tests_has_the_name_of_a_file_of_its_wing(wing):
    rooms = {path.stem for path in (ROOT / "funcshard" / wing).glob("*.py")} - {"__init__"}
    stems = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / wing).glob("test_*.py")}
    assert {stem for stem in stems if not any(stem == room or stem.startswith(f"{room}_") for room in rooms)} == set()


def test_no_file_has_the_name_of_something_that_its_door_exports():
    # A file core/remat.py could not be imported: funcshard.core.remat is the function.
    files = [file.relative_to(ROOT) for file in (ROOT / "funcshard").rglob("*.py") if file.stem != "__init__"]
    doors = {file: importlib.import_module(".".join(file.parent.parts)) for file in files}
    exported = {file: getattr(door, file.stem, None) for file, door in doors.items()}
    assert [file for file, value in exported.items() if not (value is None or inspect.ismodule(value))] == []


@pytest.mark.slow
def test_importing_loads_the_dependencies_alone_and_starts_nothing_and_gradients_do_not_import_dynamo(copied_house):
    # One process shows all: apart from the planted extra, funcshard loads nothing.
    (copied_house / "planted.py").write_text("")
    with (copied_house / "funcshard" / "plan" / "wrap.py").open("a") as file:
        file.write("\nimport planted\n")
    # The environment that torchrun sets. With it, init_mesh would start a process group.
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = python(IMPORTING, copied_house, **launched)
    assert (done.returncode, done.stdout.strip()) == (0, '["funcshard", "planted"]'), done.stdout + done.stderr


def test_no_file_names_a_folder_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("git does not list the files of this copy")
    machine = re.compile(r"(?<![\w.:/])/(work|home|root|Users|tmp)/\w")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert len(files) > 500
    found = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore") if file.suffix not in (".ipynb", ".json") else ""
        found += [f"{file.relative_to(ROOT)}: {match.group()}" for match in machine.finditer(text)]
    assert found == []


def test_an_editable_install_is_a_path_so_that_scripts_beside_the_clone_find_the_package():
    # Why: with a finder, Python takes the clone's folder, of the same name, for a namespace package.
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert options["package-dir"] == {"": "."}
