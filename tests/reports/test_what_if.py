"""The what-if page: what is asked is what the simulator runs, and nothing of this machine is given away."""

import http.client
import re
import threading

import pytest

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.errors import ConfigError
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim.simulate import simulate
from reports.what_if import Question, answer, open_server

MACHINE = "h100-sxm-80g_xeon-8481c"
ASKED = "model=llada2-mini&methods=dense&methods=herald&context=4096&batch=4&steps=8"


@pytest.fixture
def server(tmp_path):
    (tmp_path / "report.html").write_text("<!doctype html><p>a page</p>", encoding="utf-8")
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    with open_server(0, tmp_path) as opened:
        thread = threading.Thread(target=opened.serve_forever, daemon=True)
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


def get(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    response = connection.getresponse()
    return response.status, response.read().decode(), response


def test_the_answer_is_what_the_simulator_says():
    sections = answer(Question.of(ASKED))
    shown = {row[0].text: row[1].text for row in sections[0].table.rows}
    profile = hardware_io.resolve(MACHINE)
    for method in ("dense", "herald"):
        workload = Workload.uniform(4096, 4, gen_tokens=6 * 32, steps=8)
        expected = simulate(build(catalogue.get("llada2-mini"), method), profile, workload)
        assert shown[method] == f"{expected.throughput_tok_s:,.0f}"


def test_a_method_that_does_not_fit_is_said_beside_those_that_do():
    sections = answer(Question.of("methods=dense&methods=herald&context=32768&batch=40&steps=4"))
    assert [row[0].text for row in sections[0].table.rows] == ["herald"]
    assert any(note.startswith("dense: ") for note in sections[0].notes)


def test_a_method_without_retrieval_has_no_time_of_it_and_numbers_stand_as_numbers():
    dense, herald = answer(Question.of(ASKED))[0].table.rows
    assert (dense[4].text, herald[4].kind) == ("", "number")
    assert float(herald[4].text) > 0
    assert dense[6].kind == ""


def test_what_lies_outside_the_measured_range_is_named():
    asked = "methods=herald&context=40960&batch=70&hardware=h200-141g_emr-16vcpu-8"
    (section, *_) = answer(Question.of(asked))
    assert section.table.rows[0][6].text == "EXTRAPOLATED"
    (note,) = (note for note in section.notes if note.startswith("herald: outside what was measured: "))
    assert "select_dram_efficiency" in note
    assert "gemm_efficiency" not in note  # prefill's alone, and the page shows no time of it


def test_changes_reach_the_machine():
    """Dense does not use the link; InfiniGen's fetches are the link."""
    plain, fast = (
        float(answer(Question.of(f"methods=infinigen&context=4096&batch=4&sets={sets}"))[0].table.rows[0][1].text)
        for sets in ("", "machine.link.h2d_gb_s%3D31")
    )
    assert fast > plain


def test_the_form_comes_first_and_loads_nothing_from_elsewhere(server):
    status, text, response = get(server, "/")
    assert status == 200
    assert '<select name="model">' in text
    assert '<a href="/report.html">' in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?(https?:|//)", text)
    assert "default-src 'none'" in response.getheader("Content-Security-Policy")


def test_what_was_asked_stays_in_the_form(server):
    status, text, _ = get(server, f"/?{ASKED}")
    assert status == 200
    assert 'name="context" size="8" value="4096"' in text
    assert re.search(r'value="herald" checked', text)
    assert "Throughput: llada2-mini, 4,096 tokens, batch 4, T = 8" in text


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("context=abc", "context must be a number"),
        ("batch=0", "batch must be"),
        ("context=1e12", "context must be"),
        ("model=/etc/passwd", "model must be one of"),
        ("hardware=../x.toml", "hardware must be one of"),
        ("methods=heraldd", "herald"),
        ("contxt=5", "unknown field contxt"),
        ("sets=machine.link.h2d=5", "machine.link.h2d"),
    ],
)
def test_a_mistake_is_a_sentence_on_the_page(server, query, message):
    status, text, _ = get(server, f"/?{query}")
    assert status == 400
    assert message in text
    assert "Traceback" not in text


def test_typed_markup_is_shown_as_text(server):
    _, text, _ = get(server, "/?context=%22%3E%3Cscript%3Ealert(1)%3C/script%3E")
    assert "<script>alert(1)" not in text


def test_pages_of_the_folder_are_served_and_other_files_are_not(server):
    assert get(server, "/report.html")[1] == "<!doctype html><p>a page</p>"
    for path in ("/secret.txt", "/../secret.txt", "/%2e%2e/secret.txt", "/nothing.html"):
        assert get(server, path)[0] == 404


def test_another_sites_name_for_this_machine_is_refused(server):
    status, text, _ = get(server, "/", host="attacker.example")
    assert (status, "local name only" in text) == (403, True)


def test_the_server_is_on_the_loopback_interface_only(server):
    assert server.server_address[0] == "127.0.0.1"


def test_a_taken_port_is_a_message(server):
    with pytest.raises(ConfigError, match=r"cannot be used .*or 0 for any free one"):
        open_server(server.server_port)


def test_a_missing_folder_is_a_message(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        open_server(0, tmp_path / "none")
