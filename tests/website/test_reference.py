"""Every public name has a page of its own, and pages link to it."""

from pathlib import Path

import pytest

import funcshard
from website.reference import link_names, page_of, public_names, short_rows

ROOT = Path(__file__).resolve().parents[2]
PATHS = {
    "fs.shard": "api/shard.md",
    "fs.Mesh": "api/Mesh.md",
    "funcshard.testing.delayed": "api/testing.delayed.md",
    "02_two.ipynb": "02_two.md",
    "fs.wrap.by_class": "api/wrap.by_class.md",
    "notebooks/01_one.ipynb": "notebooks/01_one.md",
    "examples/lora.py": "examples/lora.md",
}


def test_every_public_name_has_one_page():
    names = public_names(ROOT)
    assert len({name.path for name in names}) == len(names)
    modules = {"linalg": funcshard.linalg, "wrap": funcshard.wrap, "passes": funcshard.passes}
    expected = {name for name in funcshard.__all__ if name not in modules} - {"testing"}
    expected |= {f"{prefix}.{name}" for prefix, module in modules.items() for name in module.__all__}
    assert expected <= {name.short for name in names}


def test_a_page_names_an_object_that_exists():
    for name in public_names(ROOT):
        module, _, attribute = name.full.rpartition(".")
        assert hasattr(__import__(module, fromlist=[attribute]), attribute), name.full
        wing = ROOT / name.full.replace(".", "/")
        assert not wing.is_dir(), f"the page of {name.short} would show the wing {name.full} and not the function in it"
        assert page_of(name).startswith(f"::: {name.full}\n")


def test_a_class_that_scripts_construct_has_a_signature():
    signatures = {name.short: "merge_init_into_class: true" in page_of(name) for name in public_names(ROOT)}
    assert all(signatures[name] for name in ("MixedPrecision", "GradScaler", "wrap.Units"))
    assert not any(signatures[name] for name in ("Plan", "Mesh", "shard"))


def test_a_public_name_without_a_row_is_named(tmp_path):
    for file in ("__init__.py", "linalg.py", "plan/wrap.py", "graph/passes/__init__.py"):
        (tmp_path / "funcshard" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "funcshard" / file).write_text((ROOT / "funcshard" / file).read_text())
    text = (ROOT / "docs" / "names.md").read_text()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "names.md").write_text(text.replace("| `fs.shard(", "| `shard("))
    with pytest.raises(ValueError, match=r"docs/names.md has no row for shard: add one"):
        public_names(tmp_path)


LINKED = {
    "call `fs.shard`.": "call [`fs.shard`](api/shard.md).",
    "`fs.shard(params, ...)`": "[`fs.shard(params, ...)`](api/shard.md)",
    "`fs.Mesh.reshaped(shape)`": "[`fs.Mesh.reshaped(shape)`](api/Mesh.md)",
    "`notebooks/01_one.ipynb`": "[`notebooks/01_one.ipynb`](notebooks/01_one.md)",
    "`funcshard.testing.delayed(mesh)`": "[`funcshard.testing.delayed(mesh)`](api/testing.delayed.md)",
    "`examples/lora.py`": "[`examples/lora.py`](examples/lora.md)",
}
UNCHANGED = ["[`fs.shard`](other.md)", "## `fs.shard`", "```python\n`fs.shard`\n```", "`fs.unknown`"]


@pytest.mark.parametrize("text", [*LINKED, *UNCHANGED])
def test_names_in_the_text_link_to_their_pages(text):
    assert link_names(text, PATHS) == LINKED.get(text, text)


def test_the_table_of_names_has_no_arguments_on_the_site():
    row = "| `fs.shard(params, plan, *, src=None)` `-> shards` | Cut with `src=None`. |\n"
    assert short_rows(row) == "| `fs.shard` | Cut with `src=None`. |\n"
    assert short_rows("| `funcshard.testing.a(x)` `-> y` | B. |\n") == "| `funcshard.testing.a` | B. |\n"
    assert short_rows("| `fs.a(x)` `-> y`, `fs.b(y)` | See `fs.a(1)`. |\n") == "| `fs.a`, `fs.b` | See `fs.a(1)`. |\n"
