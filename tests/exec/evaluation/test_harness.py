"""The lm-eval adapter on small local task files: scores, contexts, truncation, consent, versions."""

import json

import pytest
import typer
from typer.testing import CliRunner

from herald_exec.evaluation.harness import Selection, check_versions, run_harness, setting_deviations, suite_selection
from herald_exec.evaluation.harness_command import harness_command
from herald_exec.evaluation.harness_model import HeraldLM, longest_prompt, truncate_middle
from herald_exec.evaluation.suites import SUITES, get_suite
from herald_pipeline.errors import ConfigError, HeraldError, RunError
from herald_pipeline.scheduling.lengths import padded_tokens

# lm-eval and the data set library warn about their own dependencies; those warnings are not ours to mend.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


@pytest.fixture
def lm(folder):
    return HeraldLM(str(folder), max_new_tokens=16, threshold=0.9, batch_size=3)


@pytest.mark.parametrize("folder", ["llada-8b", "sdar-8b"], indirect=True)
def test_scores_count_the_documents_that_the_model_answers_as_the_target_says(lm, write_task, answer):
    questions = ["Hello", "What is 2+2?", "x y z", "a"]
    documents = [{"question": q, "answer": answer(q, stop=["~~"])} for q in questions]
    documents[2]["answer"] += "!"
    tasks = write_task(documents)
    report = run_harness(lm, Selection(("mine",), (tasks,)), samples=True)
    assert report["scores"] == {"mine": {"exact_match,none": 0.75}}
    assert report["documents"] == {"mine": 4}
    assert [sample["answer"] for sample in report["samples"]["mine"]] == [answer(q, stop=["~~"]) for q in questions]
    assert report["versions"]["tasks"] == {"mine": 2.5}
    assert report["decoding"]["requests"] == 4
    assert report["decoding"]["forwards"] >= report["decoding"]["tokens"] / 16


def test_stop_words_of_the_task_end_answers(lm, write_task, answer):
    free = answer("Hello")
    word = free[3:5]
    tasks = write_task([{"question": "Hello", "answer": free.partition(word)[0]}], extra="")
    path = tasks / "mine.yaml"
    path.write_text(path.read_text().replace('until: ["~~"]', f"until: [{json.dumps(word)}]"))
    assert run_harness(lm, Selection(("mine",), (tasks,)))["scores"]["mine"]["exact_match,none"] == 1.0


def test_worked_examples_come_before_the_question(lm, write_task, answer):
    documents = [{"question": "a=", "answer": "1"}, {"question": "b=", "answer": "2"}]
    tasks = write_task(documents, extra="fewshot_config:\n  sampler: first_n\n")
    report = run_harness(lm, Selection(("mine",), (tasks,), num_fewshot=1), samples=True)
    assert report["settings"]["num_fewshot"] == {"mine": 1}
    assert report["samples"]["mine"][1]["answer"] == answer("a= 1\n\nb=", stop=["~~"])


def test_chat_template_wraps_the_question(lm, write_task, answer):
    tasks = write_task([{"question": "why?", "answer": "x"}])
    report = run_harness(lm, Selection(("mine",), (tasks,)), chat=True, samples=True)
    assert report["samples"]["mine"][0]["answer"] == answer("<user>why?>", stop=["~~"], special=False)


def test_long_prompts_lose_their_middle_when_asked_and_are_refused_otherwise(folder, write_task, answer):
    question = "b" * 300 + "MIDDLE" + "e" * 300
    tasks = write_task([{"question": question, "answer": "x"}, {"question": "short", "answer": "x"}])
    selection = Selection(("mine",), (tasks,))
    cut = HeraldLM(str(folder), max_new_tokens=16, threshold=0.9, middle_truncation=True, max_prompt_tokens=40)
    report = run_harness(cut, selection, samples=True)
    assert report["samples"]["mine"][0]["answer"] == answer("b" * 20 + "e" * 20, stop=["~~"])
    assert report["decoding"]["truncated"] == 1
    with pytest.raises(ConfigError, match="the limit is 512"):
        run_harness(HeraldLM(str(folder), max_new_tokens=16), selection)


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 8])
def test_the_middle_is_what_is_cut(limit):
    tokens = list(range(7))
    kept = truncate_middle(tokens, limit)
    assert len(kept) == min(limit, 7)
    head = min(limit, 7) // 2 if limit < 7 else 7
    assert kept[:head] == tokens[:head]
    assert kept[head:] == tokens[7 - (len(kept) - head) :]


@pytest.mark.parametrize(("limit", "new", "block"), [(512, 16, 8), (513, 16, 8), (4096, 256, 32), (100, 1, 32)])
def test_the_longest_prompt_fits_and_one_block_more_does_not(limit, new, block):
    longest = longest_prompt(limit, new, block)
    assert padded_tokens(longest, new, block) <= limit
    assert padded_tokens(longest + block, new, block) > limit


def test_code_is_executed_only_with_consent(lm, write_task):
    tasks = write_task([{"question": "def f():", "answer": "x"}], extra="unsafe_code: true")
    with pytest.raises(ConfigError, match="mine: scoring executes code that the model writes"):
        run_harness(lm, Selection(("mine",), (tasks,)))
    assert lm.counts.requests == 0
    report = run_harness(lm, Selection(("mine",), (tasks,)), allow_code_execution=True)
    assert report["documents"] == {"mine": 1}


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_code_suites_ask_for_consent(lm, name):
    with pytest.raises(ConfigError, match="pass --allow-code-execution"):
        run_harness(lm, suite_selection(get_suite(name)), allow_other_versions=True)


@pytest.mark.parametrize("name", sorted(SUITES))
def test_pinned_tasks_exist_in_the_installed_harness_in_their_version(name):
    assert check_versions(suite_selection(get_suite(name))) == []


def test_another_version_is_refused_unless_allowed(lm, tmp_path):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    (folder / "gsm8k.yaml").write_text("task: gsm8k\ndataset_path: json\nmetadata:\n  version: 4.0\n")
    selection = Selection(("gsm8k",), (folder,), 5, get_suite("gsm8k"))
    with pytest.raises(ConfigError) as caught:
        run_harness(lm, selection)
    assert caught.value.problems[0] == "task gsm8k has version 4.0 in the installed lm-eval, pinned is 3.0"


def test_settings_that_differ_from_the_suite_are_said(folder):
    suite = get_suite("2wikimqa")
    other = HeraldLM(str(folder), max_new_tokens=16, threshold=0.8)
    assert setting_deviations(other, suite) == [
        "max_new_tokens is 16, pinned is 512",
        "threshold is 0.8, pinned is 0.95",
        "middle_truncation is False, pinned is True",
    ]
    assert setting_deviations(HeraldLM(str(folder)), None) == []


def test_suites_are_as_the_papers_ran_them():
    fewshot = {name: suite.num_fewshot for name, suite in SUITES.items()}
    assert {name: fewshot[name] for name in ("gsm8k", "math", "humaneval", "mbpp", "bbh")} == {
        "gsm8k": 5,
        "math": 4,
        "humaneval": 0,
        "mbpp": 3,
        "bbh": 3,
    }
    for name in ("2wikimqa", "narrativeqa", "qmsum", "repobench-p"):
        suite = SUITES[name]
        assert (suite.max_new_tokens, suite.threshold, suite.middle_truncation) == (512, 0.95, True)


def test_likelihood_tasks_are_refused(lm, write_task):
    tasks = write_task([{"question": "a", "answer": "b"}])
    path = tasks / "mine.yaml"
    text = path.read_text().replace("generate_until", "loglikelihood").replace("exact_match", "acc")
    path.write_text(text.partition("generation_kwargs")[0] + "metadata:\n  version: 1.0\n")
    with pytest.raises(ConfigError, match="a diffusion model has no exact likelihood"):
        run_harness(lm, Selection(("mine",), (tasks,)))


def test_a_data_set_that_cannot_be_read_is_one_message(lm, write_task, tmp_path):
    tasks = write_task([{"question": "a", "answer": "b"}])
    (tmp_path / "mine.jsonl").unlink()
    with pytest.raises(RunError, match="lm-eval stopped: "):
        run_harness(lm, Selection(("mine",), (tasks,)))


def invoke(*arguments):
    app = typer.Typer()
    app.command()(harness_command)
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_prints_one_json_object(folder, write_task, answer):
    tasks = write_task([{"question": "Hello", "answer": answer("Hello", stop=["~~"])}, {"question": "x", "answer": ""}])
    options = ("--model", folder, "--task", "mine", "--tasks-dir", tasks, "--max-tokens", 16, "--threshold", 0.9)
    content = json.loads(invoke(*options, "--limit", 1, "--json").stdout)
    assert content["scores"] == {"mine": {"exact_match,none": 1.0}}
    assert not content["pinned"]
    assert "exact_match,none" in invoke(*options).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--suite", "gsm9k"), "did you mean 'gsm8k'"),
        (("--suite", "gsm8k", "--num-fewshot", 3), "--suite fixes tasks and examples"),
        ((), "say what to evaluate: --harness with --suite or --task"),
        (("--harness",), "name a suite"),
        (("--harness", "--method", "specontext"), "specontext can only be simulated"),
        (("--task", "mine"), "name a suite"),
        (("--task", "other", "--tasks-dir", "."), "unknown task 'other'"),
    ],
)
def test_what_cannot_be_is_refused_in_words(folder, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HeraldError, match=message):
        invoke("--model", folder, *options)
