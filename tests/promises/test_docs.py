"""The documentation is true: every public name has an example, and all examples and pages run."""

import ast
import contextlib
import doctest
import inspect
import io
import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import funcshard
from funcshard.plan import wrap
from funcshard.testing import delayed, same_on_every_mesh
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# A type alias, such as wrap.Policy, has no docstring of its own.
PUBLIC = {
    **{f"funcshard.{name}": getattr(funcshard, name) for name in funcshard.__all__},
    **{f"funcshard.wrap.{name}": getattr(wrap, name) for name in wrap.__all__ if name != "Policy"},
    **{f"funcshard.linalg.{name}": getattr(funcshard.linalg, name) for name in funcshard.linalg.__all__},
    **{f"funcshard.passes.{name}": getattr(funcshard.passes, name) for name in funcshard.passes.__all__},
    "funcshard.testing.delayed": delayed,
    "funcshard.testing.same_on_every_mesh": same_on_every_mesh,
}
MEMBERS = {
    f"{name}.{member}": getattr(value, member)
    for name, value in PUBLIC.items()
    if inspect.isclass(value)
    for member in vars(value)
    if not member.startswith("_") and ">>>" in (getattr(getattr(value, member), "__doc__", None) or "")
}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FORBIDDEN = re.compile(r"\b(wrappers?|flat[ -]param(eter)?s?|FlatParameters?)\b", re.IGNORECASE)
THEIRS = re.compile(r"PyTorch|FSDP|DistributedDataParallel|\bDDP\b|torch\.distributed")


def page_id(page):
    return str(page.relative_to(ROOT))


def examples_of(name, text):
    return doctest.DocTestParser().get_doctest(text, {}, name, None, None)


def run_examples(name, text):
    """Run the examples of one docstring in a fresh namespace, and return (number tried, report of failures)."""
    report: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # of torch's forward mode
        found = doctest.DocTestRunner(verbose=False).run(examples_of(name, text), out=report.append)
    return found.attempted, "".join(report)


def anchors(page):
    """Return the anchors of a page's headings, as code hosts and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def runnable_blocks(text):
    """Return ``(line number, code)`` of each block that is fenced as python."""
    return [(text[: m.start(2)].count("\n"), m[2]) for m in FENCE.finditer(text) if m[1] == "python"]


def sentences_with_forbidden_words(text):
    paragraphs = re.split(r"\n\s*\n|^\s*[-*|] |^#+ ", text, flags=re.MULTILINE)
    sentences = (" ".join(s.split()) for p in paragraphs for s in re.split(r"(?<=[.:;?!])\s", p))
    return [s for s in sentences if FORBIDDEN.search(s) and not THEIRS.search(s)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PUBLIC, *MEMBERS])
def test_public_name_has_an_example_that_runs(name):
    text = inspect.getdoc((PUBLIC | MEMBERS)[name]) or ""
    assert ">>>" in text, f"{name} has no example in its docstring"
    attempted, failures = run_examples(name, text)
    assert attempted > 0
    assert not failures, failures


def test_an_example_that_is_wrong_or_warns_is_seen():
    assert "Expected:\n    3" in run_examples("sum", ">>> 1 + 1\n3\n")[1]
    assert "UserWarning: careful" in run_examples("warning", ">>> import warnings\n>>> warnings.warn('careful')\n")[1]


def test_the_reference_names_every_public_name_with_its_first_arguments():
    text = (ROOT / "docs" / "names.md").read_text()
    short = [name.removeprefix("funcshard.") for name in (*PUBLIC, "funcshard.wrap.Policy")]
    assert [name for name in short if not re.search(rf"`(fs\.|funcshard\.)?{re.escape(name)}\b", text)] == []
    for name in funcshard.__all__:
        value = getattr(funcshard, name)
        if inspect.isclass(value) or inspect.ismodule(value):
            continue
        found = re.search(rf"`fs\.{name}\((.*?)\)`", text)
        assert found, f"docs/names.md does not say how to call {name}"
        shown, has_more = re.subn(r"(^|, )\.\.\.$", "", found[1])
        real = ast.parse(f"def f{bare_signature(value)}: ...").body[0].args
        listed = ast.parse(f"def f({shown}): ...").body[0].args
        arguments = [ast.unparse(args).replace("/, ", "") for args in (listed, real)]
        assert arguments[1].startswith(arguments[0]) if has_more else arguments[0] == arguments[1], name


def bare_signature(function):
    """Return a function's signature without types, as text."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_the_contributors_page_shows_the_wings_from_the_ground_up():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = next(c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    floors = [set(layer.split(" | ")) for layer in reversed(layers)]
    rows = [
        re.findall(r"`(\w+)(?:/|\.py)`", row)
        for row in re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    ]
    named = [name for row in rows for name in row]
    assert sorted(named) == sorted(set().union(*floors)), "each wing in one row"
    floor_of = {name: number for number, floor in enumerate(floors) for name in floor}
    first = [floor_of[row[0]] for row in rows]
    assert first == sorted(first)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo hides this warning
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    if page.stem in ("training", "compiling") and torch.__version__ < "2.13":
        pytest.skip("the page compiles on simulated ranks, which older versions of torch cannot")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__page__"}
    for line, code in runnable_blocks(page.read_text()):
        compiled = compile("\n" * line + code, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compiled, namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_page_uses_the_words_of_the_house(page):
    assert len(sentences_with_forbidden_words("The wrapper is full. PyTorch's wrapper. A flat param.")) == 2
    assert sentences_with_forbidden_words(FENCE.sub("", page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_of_a_page_resolve(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page_id(page)} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(other), f"{page_id(page)} links to {target}; no such heading"


def test_readme_has_the_ratios_of_the_page_on_performance():
    page = (ROOT / "docs" / "performance.md").read_text()
    rows = re.findall(r"^\| (GPT of .*?), 2 CPU ranks \| (.*?) \| (.*?) \| (.*?) \|$", README.read_text(), re.MULTILINE)
    assert len(rows) == 2
    for model, fsdp2, ddp, jax in rows:
        assert f"| {model}, `full_shard` | 2 | {ddp} | {fsdp2} | {jax} |" in page


@pytest.mark.slow
def test_the_tutorials_program_trains_on_two_processes_and_continues(tmp_path):
    page = (ROOT / "docs" / "tutorial.md").read_text()
    program = next(code for _, code in runnable_blocks(page) if code.startswith("# train.py\n"))
    assert "torchrun --nproc-per-node 2 train.py\ntorchrun --nproc-per-node 2 train.py\n" in page
    (first, _), (second, _) = (run_ranks(run_program, 2, program, str(tmp_path)) for _ in range(2))
    assert re.fullmatch(r"rank 0 of 2, step 50: loss \d+\.\d{3}\n", first)
    assert re.fullmatch(r"rank 0 continues at step 50\nrank 0 of 2, step 100: loss \d+\.\d{3}\n", second)
    assert float(second.split()[-1]) < float(first.split()[-1])


def run_program(_mesh, program, folder):
    """Run a program as on a rank of torchrun, but in this process; return its output."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {"__name__": "__main__"})
    return out.getvalue()


def test_pages_are_all_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    generated = {"changes.md", "contributing.md"}  # website/hooks.py copies them
    docs = ROOT / "docs"
    assert listed - generated == {str(page.relative_to(docs)) for page in PAGES if page.is_relative_to(docs)}
