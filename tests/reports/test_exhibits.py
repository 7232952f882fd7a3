"""The papers' exhibits on a page: every printed value is there, and no chart draws what no row states."""

import json

import pandas as pd
import pytest

from herald_pipeline import hardware_io
from herald_sim.exhibits import rows as exhibit_rows
from herald_sim.exhibits.targets import HARDWARE
from reports import cli, exhibits, paper_frames
from reports.page import render


@pytest.fixture(scope="module")
def profile():
    return hardware_io.resolve(HARDWARE)


QUICK = (exhibits.fig_5, exhibits.fig_6, exhibits.fig_8, exhibits.dsb_table_3, exhibits.dsb_example, exhibits.fit)


def cells(section):
    return {cell.text for row in section.table.rows for cell in row}


@pytest.mark.parametrize("make", QUICK, ids=lambda make: make.__name__)
def test_every_chart_is_valid_json_with_words_for_those_who_do_not_see_it(make, profile):
    spec = make(profile).chart.to_dict()
    assert len(spec["description"]) > 40
    json.dumps(spec, allow_nan=False)


@pytest.mark.parametrize("make", QUICK, ids=lambda make: make.__name__)
def test_every_chart_says_where_its_numbers_come_from(make, profile):
    assert "published" in make(profile).chart.to_dict()["title"]["subtitle"]


def test_every_printed_ceiling_stands_in_the_table(profile):
    printed = {f"{row['published']:,.0f}" for row in exhibit_rows("fig-5", profile)}
    assert printed <= cells(exhibits.fig_5(profile))


def test_a_value_that_the_paper_does_not_print_has_no_diamond(profile):
    """Of Fig. 4 the paper's text has the batch where memory ends, and the line across."""
    frame = paper_frames.fig_4(profile)
    assert set(frame.loc[frame["published"].notna(), "batch"].fillna(0)) == {16, 0}


def test_the_line_beyond_memory_starts_where_the_other_ends(profile):
    frame = paper_frames.fig_4(profile)
    fits = frame[frame["fits"] == "fits"]
    beyond = frame[(frame["fits"] == "beyond memory") & frame["batch"].notna()]
    assert beyond["batch"].min() == fits["batch"].max()


def test_the_gain_of_one_query_is_that_of_the_exhibit(profile):
    """One comes from the price of a launch, the other from the closed form of the ceilings."""
    frame = paper_frames.selection_by_queries(profile).set_index("queries")
    assert frame.loc[1, "gain"] == pytest.approx(exhibit_rows("fig-8", profile)[0]["value"], rel=0.01)


def test_no_selection_lies_above_the_roof(profile):
    frame = paper_frames.cpu_roofline(profile)
    dots = frame[frame["queries"].notna()]
    assert (dots["value"] <= dots["roof"]).all()
    # G = 4 query heads share each KV byte of bf16: 2 FLOP x 2 products / (2 x 2 bytes) x 4 per query.
    assert list(dots["intensity"]) == pytest.approx([4, 8, 16, 32, 64, 128])


def test_panels_of_fig_14_hold_their_own_context_only(profile):
    frame = paper_frames.fig_14(profile)
    for panel in ("16K", "32K"):
        own = frame[(frame["panel"] == panel) & (frame["method"] == "dense")]
        assert not own["T"].duplicated().any()


def test_a_missing_number_is_an_empty_cell_and_never_nan(profile):
    section = exhibits.dsb_table_3(profile)
    assert section.table.rows
    assert not {"nan", "None"} & cells(section)


def test_the_page_holds_all_sections_and_no_address_outside_it(profile):
    sections = [make(profile) for make in QUICK]
    html = render("t", "l", sections)
    assert all(section.title in html for section in sections)
    assert "http" not in html[html.index("<body>") : html.index("<script>")]


def test_runs_and_exhibits_are_two_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reports", "build", "--exhibits", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code != 0
    assert "give one of them" in capsys.readouterr().err


def test_a_page_of_nothing_is_refused_with_both_ways_out(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reports", "build"])
    with pytest.raises(SystemExit):
        cli.main()
    message = capsys.readouterr().err
    assert "--trace FILE shows a run, --runs FOLDER with --hardware" in message
    assert "--exhibits" in message


def test_numbers_of_a_table_keep_their_size_readable():
    frame = pd.DataFrame({"value": [13198.85, 0.0646, 8.0, 47.4]})
    assert [row[0].text for row in exhibits._table(frame, ["value"]).rows] == ["13,199", "0.0646", "8", "47.4"]


def test_a_folder_in_the_page_s_place_is_refused_before_anything_is_computed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reports", "build", "--exhibits", "--out", str(tmp_path)])
    monkeypatch.setattr(cli, "_exhibits", lambda *_: pytest.fail("computed"))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "it is a folder; name a file in it" in capsys.readouterr().err


def test_a_page_s_name_with_a_picture_s_ending_is_refused_with_the_valid_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reports", "build", "--exhibits", "--out", str(tmp_path / "page.png")])
    monkeypatch.setattr(cli, "_exhibits", lambda *_: pytest.fail("computed"))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert (
        "an HTML page is written there, .png says otherwise; end its name in .html or .htm" in capsys.readouterr().err
    )
