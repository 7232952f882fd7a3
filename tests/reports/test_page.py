import json
import re

import altair as alt
import pandas as pd
import pytest

from herald_pipeline.errors import ConfigError
from reports.frames import read_reconcile
from reports.page import Cell, Section, Table, png, render

BUNDLE_MARK = "window.vegaEmbed="


def chart(text="a"):
    frame = pd.DataFrame({"x": [1, 2], "y": [3, 4], "t": [text, text]})
    return alt.Chart(frame).mark_point().encode(x="x:Q", y="y:Q", tooltip="t:N").properties(description="two points")


def page(*sections):
    return render("Title", "lead", sections)


def specs(html):
    found = re.search(r"const specs = (.*);\n", html)
    return json.loads(found.group(1))


def test_the_bundle_is_inside_once_whatever_the_number_of_charts():
    html = page(*(Section(f"s{i}", chart=chart()) for i in range(3)))
    assert html.count(BUNDLE_MARK) == 1
    assert list(specs(html)) == ["chart-0", "chart-1", "chart-2"]
    assert len(html) < 1_300_000


def test_nothing_is_loaded_from_elsewhere():
    html = page(Section("s", chart=chart()))
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?(https?:|//)", html)
    assert "import(" not in html.split("const specs")[1]


def test_every_figure_has_its_text():
    assert 'aria-label="two points"' in page(Section("s", chart=chart()))


def test_text_that_looks_like_markup_is_shown_and_not_run():
    html = page(Section("<b>bold</b>", ("a & b <script>alert(1)</script>",), chart=chart("</script><script>alert(2)")))
    assert "&lt;b&gt;bold&lt;/b&gt;" in html
    assert "alert(1)</script>" not in html
    assert "</script><script>alert(2)" not in html
    assert specs(html)["chart-0"]["datasets"]


def test_tables_are_escaped_and_keep_their_kinds():
    table = Table(("name", "value"), [(Cell("<x>"), Cell("1.0", "number bad"))])
    html = page(Section("s", table=table))
    assert "<td>&lt;x&gt;</td>" in html
    assert '<td class="number bad">1.0</td>' in html


def test_a_number_that_json_cannot_carry_is_refused():
    broken = alt.Chart(alt.Data(values=[{"x": float("inf")}])).mark_point().encode(x="x:Q")
    with pytest.raises(ConfigError, match="JSON cannot carry"):
        page(Section("s", chart=broken))


def test_a_chart_becomes_a_png_without_a_browser():
    assert png(chart()).startswith(b"\x89PNG\r\n")


def test_a_folder_without_a_report_says_which_command_makes_it(tmp_path):
    with pytest.raises(ConfigError, match="make it: python -m calibration reconcile --out"):
        read_reconcile(tmp_path)


def test_a_file_that_is_no_report_is_refused_with_what_it_lacks(tmp_path):
    (tmp_path / "reconcile.json").write_text('{"points": []}', encoding="utf-8")
    with pytest.raises(ConfigError, match="lacks hardware, model, summary"):
        read_reconcile(tmp_path)


def test_an_interval_stands_below_its_number_and_words_stay_as_they_are():
    number, words = Cell("98.5 (97.1 to 99.0)", "number bad"), Cell("measured (here)")
    table = Table(("a", "b"), [(number, words)])
    page = render("t", "l", [Section("s", table=table)])
    assert '<td class="number bad">98.5 <small>(97.1 to 99.0)</small></td>' in page
    assert "<td>measured (here)</td>" in page


def test_a_heading_stands_above_the_numbers_of_its_column_also_where_some_are_missing():
    rows = [(Cell("a"), Cell("1", "number")), (Cell("b"), Cell(""))]
    assert [Table(("name", "value"), rows).is_number(column) for column in (0, 1)] == [False, True]
    assert '<th>name</th><th class="number">value</th>' in page(Section("s", table=Table(("name", "value"), rows)))
