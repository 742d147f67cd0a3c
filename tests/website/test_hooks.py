"""Cells and code break between words and parts of long names, and not before a unit or inside a range."""

import pytest

pytest.importorskip("mkdocs")
from website.hooks import on_page_content

SHOWN = {
    "<td><code>fs.make_plan</code></td>": "<td><code>fs.make_plan</code></td>",
    "<td><code>fs.optimizer_from_state_dict</code></td>":
        "<td><code>fs.optimizer_<wbr>from_<wbr>state_<wbr>dict</code></td>",
    "<td><code>fs.fully_shard(apply.eval(), x, y=1.0)</code></td>":
        "<td><code>fs.fully_shard(<wbr>apply.eval(), x, y=1.0)</code></td>",
    "<td>0.9 (0.85–0.98)</td>": '<td><span class="number">0.9 (0.85–\N{WORD JOINER}0.98)</span></td>',
    "<td>b (n-1)/n, <code>f(n-1)</code></td>":
        '<td>b (n\N{MINUS SIGN}1)/n, <code><span class="word">f(n-1)</span></code></td>',
    "<td>1.2 MiB</td>": "<td>1.2\N{NO-BREAK SPACE}MiB</td>",
    "<td>4.3 (2.9) %</td>": '<td><span class="number">4.3 (2.9) %</span></td>',
    "<p><code>run --json x</code></p>": '<p><code>run <span class="word">--json</span> x</code></p>',
    '<h1 id="x">fs.optimizer_from_state_dict</h1>': '<h1 id="x">fs.optimizer_<wbr>from_<wbr>state_<wbr>dict</h1>',
    "<pre><code>torch.distributed.checkpoint.state_dict</code></pre>":
        "<pre><code>torch.distributed.checkpoint.state_dict</code></pre>",
}  # fmt: skip


@pytest.mark.parametrize("html", SHOWN)
def test_lines_break_where_one_can_read_on(html):
    assert on_page_content(html) == SHOWN[html]
