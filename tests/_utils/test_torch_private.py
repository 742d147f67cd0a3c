"""``untraced`` keeps Dynamo out of a function; ``callers_level`` skips this library's frames; fused kernels."""

import pytest
import torch

import funcshard as fs
from funcshard._utils.torch_private import callers_level, untraced


@pytest.mark.slow
def test_what_is_untraced_is_no_part_of_a_graph_but_what_is_compiled_there_is_compiled():
    graphs, traced = [], []

    def backend(graph, example):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_method"])
        return graph.forward

    inner = torch.compile(lambda x: x.sin(), backend=backend)

    @untraced
    def middle(x):
        traced.append(torch.compiler.is_compiling())
        return inner(x.exp())

    outer = torch.compile(lambda x: middle(x.cos()).tan(), backend=backend)
    for _ in range(2):
        torch.testing.assert_close(outer(torch.ones(2)), torch.ones(2).cos().exp().sin().tan())
    assert sorted(graphs) == [["cos"], ["sin"], ["tan"]]
    assert traced == [False, False]


def test_a_warning_is_about_who_called_the_library():
    @untraced
    def here():
        return callers_level()

    assert callers_level() == here() == 1  # a test is not part of the library
    beside = {"callers_level": callers_level}
    exec(compile("def level(): return callers_level()", f"{fs.__path__[0]}_beside/own.py", "exec"), beside)
    assert beside["level"]() == 1  # nor is a package whose name only begins with the name of this one
