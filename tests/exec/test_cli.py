"""`herald-exec run` and `doctor`: one JSON object, exit codes, messages a user can act on."""

import json
import sys

import pytest

from herald_exec import cli
from herald_exec.footprint import run_memory
from herald_exec.limits import kv_room
from herald_exec.run_text import result_text
from herald_pipeline import capacity, catalogue
from herald_pipeline.errors import CapacityError
from herald_pipeline.pipeline import build
from herald_pipeline.pools import Home
from herald_pipeline.result import Recorder
from herald_pipeline.workload import RequestSpec, Workload

RUN = ["run", "--model", "tiny", "--method", "herald", "--context", "64", "--batch", "2", "--blocks", "3"]
SMALL = [*RUN, "--block", "8", "--steps", "3"]


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command line as a shell would: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["herald-exec", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        found = capsys.readouterr()
        return code, found.out, found.err

    return call


def test_json_is_exactly_one_object_with_the_results_keys(command):
    code, out, _ = command(*SMALL, "--json", "--check")
    assert code == 0
    result = json.loads(out)
    assert result["source"] == "measured"
    assert result["method"] == "herald"
    assert result["pinned"] is False
    assert result["delivered_tokens"] == 48
    assert result["forwards"] == 3 * 4
    assert result["throughput_tok_s"] > 0
    assert result["assumptions"]


def test_a_trace_and_the_commits_can_be_written_and_read_back(command, tmp_path):
    from herald_pipeline import trace
    from herald_pipeline.steps import read_commits

    spans, commits = tmp_path / "trace.json.gz", tmp_path / "commits.json"
    code, _, _ = command(*SMALL, "--trace-out", str(spans), "--commits-out", str(commits))
    assert code == 0
    found = trace.read_chrome(spans)
    assert found.source == "measured"
    assert found.facts["pinned"] is False
    assert found.facts["result"]["delivered_tokens"] == 48
    assert {span.stream for span in found.spans} == {"main", "retrieval", "gather", "h2d", "d2h"}
    assert read_commits(commits, 8).commits(1, 2) == (3, 3, 2)
    code, out, _ = command(*RUN, "--block", "8", "--commits", str(commits), "--json")
    assert (code, json.loads(out)["forwards"]) == (0, 12)


def test_commits_that_cannot_be_written_are_one_message(command, tmp_path, monkeypatch):
    def full(self, *_args, **_kwargs):
        raise OSError(28, "No space left on device")

    commits = tmp_path / "commits.json"
    monkeypatch.setattr(type(commits), "write_text", full)
    code, _, err = command(*SMALL, "--commits-out", str(commits))
    assert (code, err.strip()) == (1, f"herald-exec: cannot write the commits to {commits}: No space left on device")


@pytest.mark.timeout(30)
def test_a_failing_kernel_ends_the_command_with_its_message_layer_and_block(command, monkeypatch):
    """U19."""
    from herald_exec import kernels
    from herald_exec.host import HostKV

    real, seen = HostKV.select, []

    def select(self, layer, *args, **kwargs):
        seen.append(layer)
        # Four layers a pass: the second launch of the pass of block 1.
        if len(seen) == 4 + 2:
            raise MemoryError("no scratch left")
        return real(self, layer, *args, **kwargs)

    assert kernels.active_tier()
    monkeypatch.setattr(HostKV, "select", select)
    code, out, err = command(*SMALL, "--json")
    assert code == 1
    assert out == ""
    assert "stage 'select', layer 1, block 1: MemoryError: no scratch left" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--method", "heralt"], 2, "unknown method 'heralt'; did you mean 'herald'?"),
        (["--require-pinned"], 1, "--require-pinned: device 'cpu' has no page-locked memory; use --device cuda"),
        (["--set", "settings.budjet=1"], 2, "did you mean 'settings.budget'?"),
        (["--set", "settings.queries=many"], 2, "settings.queries must be a whole number, got 'many'"),
        (["--set", "settings.queries=1.5"], 2, "settings.queries must be a whole number, got '1.5'"),
        (["--decoder", "confidence"], 2, "--steps and --decoder each say how many steps a block takes"),
        (["--threshold", "0.9"], 2, "--threshold belongs to a --decoder"),
        (["--gen-tokens", "5"], 2, "--blocks and --gen-tokens both say"),
        (["--blocks", "0"], 2, "blocks must be >= 1, got 0"),
        (["--device", "cuda"], 2, "torch sees 0 CUDA devices here"),
        (["--weights", "none"], 2, "--weights must be random or checkpoint"),
        (["--host-limit-gb", "0.00001"], 1, "does not fit: host memory, short by"),
        (["--host-limit-gb", "-1"], 2, "host_limit_gb must be > 0"),
        (["--batch", "0"], 2, "batch must be >= 1"),
        (["--batch-policy", "lockstepp"], 2, "did you mean 'lockstep'?"),
        (["--trace-out", "no-such-folder/trace.json"], 2, "there is no folder no-such-folder"),
        (["--requests", "none.csv"], 2, "--requests states lengths itself"),
        (["--budget", "0.2", "--set", "settings.budget=0.1"], 2, "budget is given twice"),
    ],
)
def test_a_mistake_is_one_message_and_an_exit_code(command, extra, code, message):
    found, out, err = command(*SMALL, *extra)
    assert (found, out) == (code, "")
    assert err.startswith("herald-exec: ")
    assert message in err
    assert "Traceback" not in err


def test_a_decoder_lets_confidences_decide(command):
    code, out, _ = command(*RUN, "--block", "8", "--decoder", "confidence", "--threshold", "1.0", "--json")
    assert code == 0
    assert json.loads(out)["forwards_per_block"] == 9


@pytest.mark.parametrize(
    ("method", "content", "message"),
    [
        ("herald-sliding", "[[[3], [8]]]", "replay it with `herald-sim run --method herald-sliding --commits"),
        ("herald", "[[[13, 3]]]", "`herald-sim run --method herald-sliding --commits` replays the former"),
        ("herald", '{"rows": [{"prompt_tokens": 3, "commits": [[0]]}]}', "only `herald-sim run --method dense`"),
    ],
)
def test_commits_that_only_the_simulator_replays_are_refused_with_its_command(
    command, tmp_path, method, content, message
):
    file = tmp_path / "commits.json"
    file.write_text(content)
    arguments = ["run", "--model", "tiny", "--method", method, "--context", "24", "--blocks", "2", "--block", "8"]
    code, out, err = command(*arguments, "--commits", str(file))
    assert (code, out) == (2, "")
    assert message in err


def test_requests_come_from_a_file_and_one_that_is_too_large_is_rejected(command, tmp_path):
    table = tmp_path / "requests.csv"
    table.write_text("id,prompt_tokens,new_tokens\n0,20,8\n1,4000,8\n2,33,16\n")
    arguments = ["run", "--model", "tiny", "--method", "herald", "--batch", "2", "--block", "8", "--steps", "2"]
    code, out, _ = command(*arguments, "--requests", str(table), "--host-limit-gb", "0.0005", "--json")
    result = json.loads(out)
    assert code == 0
    assert list(result["rejected"]) == ["1"]
    assert result["finished"] == 2


def test_more_threads_than_cores_are_refused_before_anything_is_loaded(command):
    code, out, err = command(*SMALL, "--threads", "9999")
    assert (code, out) == (2, "")
    assert "threads must be <= " in err


MIXED = ["run", "--model", "tiny", "--method", "herald", "--batch", "3", "--block", "8", "--steps", "2", "--json"]


@pytest.fixture
def mix(tmp_path):
    """Four short requests and a long one."""
    table = tmp_path / "mix.csv"
    table.write_text("prompt_tokens,new_tokens\n16,8\n400,8\n16,8\n16,8\n16,8\n")
    return str(table)


def test_bytes_of_mixed_requests_are_their_own_and_what_the_pools_reserve_stands_beside(command, mix):
    _, out, _ = command(*MIXED, "--requests", mix)
    result = json.loads(out)
    # In fp32 a position takes 1,024 bytes: one of 408 and two of 24 positions, where three of 408 have room.
    assert 1.0 < result["dram_bytes"] / (1024 * (408 + 2 * 24)) < 1.2
    assert 1.0 < result["dram_bytes_reserved"] / (1024 * 3 * 408) < 1.5


def test_a_limit_that_the_requests_keep_and_equal_slots_would_pass_serves_all_and_says_so(command, mix):
    _, out, _ = command(*MIXED, "--requests", mix)
    limit = f"{1.2 * json.loads(out)['dram_bytes'] / 1e9:.9f}"
    code, out, err = command(*MIXED, "--requests", mix, "--host-limit-gb", limit)
    assert (code, json.loads(out)["finished"]) == (0, 5)
    assert "3 slots with room for the longest one (408 tokens) reserve more: host memory, short by" in err


def test_on_a_device_whose_pools_are_there_as_a_whole_from_the_start_such_a_limit_refuses():
    pipeline = build(catalogue.get("tiny"), "herald", block_length=8)
    lengths = Workload((RequestSpec(0, 400, 8), RequestSpec(1, 16, 8), RequestSpec(2, 16, 8)), 3, 8)
    whole = capacity.budget(pipeline, 408, 3, run_memory(1e15, 1e15, pipeline, on_gpu=True, synthetic=False))
    limit_gb = 0.9 * whole.total(Home.DRAM) / 1e9
    assert kv_room(pipeline, lengths, None, limit_gb) is not None
    with pytest.raises(CapacityError, match=r"3 slots with room for the longest one .* reserve more"):
        kv_room(pipeline, lengths, None, limit_gb, on_gpu=True)


def test_where_no_request_at_all_can_be_served_the_run_ends_with_a_sentence_and_code_1(command, mix):
    code, out, err = command(*MIXED, "--requests", mix, "--host-limit-gb", "0.00001")
    assert (code, out) == (1, "")
    assert "none of the 5 request(s) can be served: the smallest takes 24 positions" in err


def test_synthetic_kv_replaces_the_prefill(command):
    code, out, _ = command(*SMALL, "--synthetic-kv", "--check", "--json")
    assert code == 0
    assert json.loads(out)["delivered_tokens"] == 48


def test_the_time_of_a_fill_is_no_prefills(command):
    _, out, _ = command(*SMALL, "--synthetic-kv", "--json")
    result = json.loads(out)
    assert result["fill_time_s"] > 0
    assert not {"prefill_time_s", "prefill_tok_s", "end_to_end_tok_s"} & set(result)
    _, text, _ = command(*SMALL, "--synthetic-kv")
    assert [line.split(":")[0] for line in text.splitlines() if "prefill" in line] == ["  prefill         none"]


def test_with_prompts_the_prefill_has_its_rate(command):
    _, out, _ = command(*SMALL, "--json")
    result = json.loads(out)
    assert result["prefill_tok_s"] == pytest.approx(2 * 64 / result["prefill_time_s"])
    assert "fill_time_s" not in result


@pytest.fixture
def undrawn(monkeypatch):
    """No weights may be drawn."""

    def drawn(*_arguments, **_options):
        raise AssertionError("weights were drawn")

    monkeypatch.setattr("herald_exec.models.random_model", drawn)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("method", ["ideal", "specontext"])
def test_a_method_that_is_only_simulated_is_refused_before_weights_are_drawn(command, method):
    code, _, err = command(*RUN[:4], method, *RUN[5:])
    assert code == 2
    assert f"method {method} can only be simulated (`herald-sim run --method {method}`)" in err


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("limit", [(), ("--host-limit-gb", "1")])
def test_layers_that_are_all_exact_are_refused_before_weights_are_drawn(command, limit):
    code, _, err = command(*SMALL, *limit, "--set", "settings.exact_layers=4")
    assert code == 2
    assert "settings.exact_layers must be < 4, the layers of tiny, got 4: no layer is left to select for" in err


def test_generating_with_a_method_that_is_only_simulated_is_refused_before_the_checkpoint_is_read(command):
    code, _, err = command("generate", "Hello", "--model", "no-such-folder", "--method", "ideal")
    assert code == 2
    assert "method ideal can only be simulated (`herald-sim run --method ideal`)" in err


def test_figures_for_people_leave_out_what_is_unknown(command):
    code, out, _ = command(*SMALL)
    assert code == 0
    assert "tok/s, decode, warm-up blocks excluded" in out
    assert "nan" not in out


def test_the_doctor_runs_herald_against_dense(command):
    code, out, _ = command("doctor")
    assert code == 0
    assert "herald at budget 100% gives dense's tokens" in out


def test_the_doctor_reports_a_run_that_is_wrong(command, monkeypatch):
    from herald_exec import doctor

    monkeypatch.setattr(doctor, "run_finding", lambda: doctor.Finding("run", False, "differs"))
    code, out, _ = command("doctor", "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


def test_the_doctor_names_what_a_profile_lacks(command):
    code, out, _ = command("doctor", "--profile", "cpu-only.template")
    assert code == 1
    assert "machine.dram.read_gb_s: `python -m calibration measure --only dram` measures it" in out
    code, _, _ = command("doctor", "--profile", "h100-sxm-80g_xeon-8481c")
    assert code == 0


def test_a_misspelled_variable_is_refused(command, monkeypatch):
    monkeypatch.setenv("HERALD_CPUU", "avx2")
    code, _, err = command("doctor")
    assert code == 2
    assert "HERALD_CPUU is not known; did you mean 'HERALD_CPU'?" in err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--commits-out", ".", "name a file in a folder that exists"),
        ("--commits-out", "c.csv", "JSON is written there, .csv says otherwise; end its name in .json"),
        ("--trace-out", "t.svg", "end its name in .json or .json.gz"),
        ("--threads", "0", "threads must be >= 1, got 0"),
    ],
)
def test_a_place_or_a_number_that_cannot_serve_is_refused_before_the_run(command, option, value, said):
    code, out, err = command(*SMALL, option, value)
    assert (code, out) == (2, "")
    assert said in err


def test_a_run_in_which_no_retrieval_was_counted_does_not_say_that_it_took_no_time():
    recorder = Recorder("measured")
    for end_ns in (1_000_000, 2_000_000):
        recorder.block_done(end_ns, rows=1, tokens=32)
    result = recorder.result(batch=1, budget=0.05, finished=1, rejected={})
    assert result.retrieval_time_s == 0.0
    text = result_text(result)
    assert "  block " in text
    assert "retrieval" not in text


def test_a_run_of_one_block_says_why_it_has_no_throughput(command):
    code, out, _ = command(*RUN[:5], "--context", "5", "--gen-tokens", "1", "--block", "8", "--steps", "3")
    assert code == 0
    assert "throughput      not known: the first block is warm-up" in out
    assert "1 token delivered" in out
    # A prompt shorter than a block is prefilled by the first forward: that is no rate of zero.
    assert "0 tok/s" not in out


@pytest.fixture
def of_4_gb(monkeypatch):
    """A machine with 4 GB, on which no weights may be drawn."""
    monkeypatch.setattr("herald_exec.checkpoints.memory.total_host_bytes", lambda: 4 * 10**9)
    monkeypatch.setattr("herald_exec.models.random_model", lambda *_, **__: pytest.fail("weights were drawn"))


@pytest.mark.usefixtures("of_4_gb")
def test_a_run_that_this_machines_memory_cannot_hold_is_refused_before_weights_are_drawn(command):
    code, _, err = command("run", "--model", "llada2-mini", "--method", "dense", "--context", "64", "--batch", "1")
    assert code == 1
    assert "65.0 GB of weights" in err
    assert "this machine has 4.0 GB" in err
    assert "--host-limit-gb" in err


@pytest.mark.usefixtures("of_4_gb")
def test_kv_pools_count_for_the_machines_memory_too(command):
    # tiny: 4 layers, K and V of 2 heads of 16 fp32 numbers: 1,024 bytes a token.
    code, _, err = command("run", "--model", "tiny", "--method", "dense", "--context", "4000000", "--batch", "1")
    assert code == 1
    assert "4.1 GB of KV pools" in err


def test_a_stated_host_limit_takes_the_place_of_what_the_machine_shows(command, monkeypatch):
    monkeypatch.setattr("herald_exec.checkpoints.memory.total_host_bytes", lambda: 1)
    assert command(*SMALL)[0] == 1
    assert command(*SMALL, "--host-limit-gb", "1")[0] == 0


def test_doctor_refuses_a_method_without_the_profile_that_it_would_be_checked_for(command):
    code, _, err = command("doctor", "--method", "mage-cpu")
    assert code == 2
    assert "give a profile" in err


def test_a_budget_of_5_is_all_of_the_kv_and_5_percent_is_named(command):
    code, out, err = command(*SMALL, "--budget", "5", "--json")
    assert code == 0
    assert json.loads(out)["budget"] == 1.0
    assert "5% is 0.05" in err
