"""Tables as text and as HTML, and the format of numbers in them."""

import pytest

from funcshard._utils import table


def test_numbers_are_aligned_right_and_words_left_without_blanks_at_the_end() -> None:
    rows = [["a", "1", "word"], ["long", "1,234", ""]]
    text = table.as_text("Title", ["name", "n", "more"], rows, total=["total", "1,235", ""])
    rule = "─" * 18
    words = ["name       n  more", rule, "a          1  word", "long   1,234", rule, "total  1,235"]
    assert text.splitlines() == ["Title", rule, *words]


def test_the_total_is_optional() -> None:
    assert table.as_text("t", ["a"], [["x"]]).splitlines()[-1] == "─"
    assert "<tfoot>" not in table.as_html("t", ["a"], [["x"]])
    assert "<tfoot>" in table.as_html("t", ["a"], [["x"]], total=["y"])


def test_html_is_escaped_everywhere() -> None:
    text = table.as_html("<i>", ["<b>"], [["a&b"]], total=['"q"'])
    assert "&lt;i&gt;" in text
    assert "&lt;b&gt;" in text
    assert "a&amp;b" in text
    assert "<i>" not in text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1024**2, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"), (3 * 1024**4, "3.0 TiB"), (2048 * 1024**4, "2048.0 TiB"),
    ],
)  # fmt: skip
def test_sizes_are_written_in_the_unit_that_keeps_them_short(number: int, text: str) -> None:
    assert table.size(number) == text


def test_counts_have_thousands_separated() -> None:
    assert [table.count(n) for n in (0, 999, 1000, 1234567)] == ["0", "999", "1,000", "1,234,567"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 ms"), (4.52e-5, "45.2 µs"), (0.00099949, "999.5 µs"), (0.0009996, "1.0 ms"), (0.0125, "12.5 ms"),
        (0.9994, "999.4 ms"), (0.9996, "1.00 s"), (1234.5, "1,234.50 s"),
    ],
)  # fmt: skip
def test_durations_are_written_in_the_unit_that_keeps_them_short(seconds: float, text: str) -> None:
    assert table.duration(seconds) == text


def test_shares_and_differences_are_written_with_a_dash_for_nothing() -> None:
    assert [table.share(1, 8), table.share(1, 0)] == ["12.5 %", "-"]
    assert [table.signed(n, table.size) for n in (1536, -1536, 0)] == ["+1.5 KiB", "−1.5 KiB", "-"]


def test_differences_are_numbers_in_a_table() -> None:
    text = table.as_text("t", ["a", "by"], [["x", "+10 B"], ["y", "−1 B"], ["z", "-"]])
    assert text.splitlines()[4:7] == ["x  +10 B", "y   −1 B", "z      -"]
