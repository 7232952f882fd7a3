"""From a folder to text: streaming, stop words, seeds, batches, the command."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from herald_exec.checkpoints.folder import open_checkpoint
from herald_exec.checkpoints.tokenizer import load_tokenizer
from herald_exec.generate import decode_settings, generate, untrained_block
from herald_exec.generate_command import generate_command
from herald_exec.prompts import Prompt, read_prompts, use_chat_template
from herald_pipeline.errors import CapacityError, ConfigError, HeraldError

PROMPTS = ["Hello", "a longer prompt than the others, by far", "x", "What is 2+2?"]
DEFAULTS = {
    "max_tokens": 24,
    "block": None,
    "decoder": "confidence",
    "threshold": None,
    "scheduler": "fixed",
    "cache": "none",
    "steps": 32,
}


def answers_of(folder, prompts=PROMPTS, *, stop=(), batch_size=8, on_text=None, **options):
    checkpoint = open_checkpoint(folder)
    tokenizer = load_tokenizer(folder)
    settings = decode_settings(checkpoint.shape, **(DEFAULTS | options))
    encoded = [Prompt(text=text).encode(tokenizer, chat=True) for text in prompts]
    return generate(checkpoint.load(), tokenizer, encoded, settings, stop=stop, batch_size=batch_size, on_text=on_text)


def test_every_family_generates_and_each_row_has_its_own_text(folder):
    together = answers_of(folder)
    assert [answer.index for answer in together] == [0, 1, 2, 3]
    for index, prompt in enumerate(PROMPTS):
        (alone,) = answers_of(folder, [prompt])
        assert alone.text == together[index].text
        assert alone.forwards == together[index].forwards
    assert len({answer.text for answer in together}) > 1


def test_batches_of_any_size_give_the_same_texts(make_folder):
    folder = make_folder()
    assert [a.text for a in answers_of(folder, batch_size=1)] == [a.text for a in answers_of(folder, batch_size=3)]


def test_the_same_seed_gives_the_same_text(folder):
    first = answers_of(folder, temperature=1.0, seed=3)
    assert [a.text for a in first] == [a.text for a in answers_of(folder, temperature=1.0, seed=3)]
    assert [a.text for a in first] != [a.text for a in answers_of(folder, temperature=1.0, seed=4)]


def test_streamed_pieces_are_the_answer(folder):
    pieces = {index: [] for index in range(len(PROMPTS))}
    answers = answers_of(folder, on_text=lambda index, text: pieces[index].append(text))
    assert ["".join(pieces[index]) for index in pieces] == [answer.text for answer in answers]
    assert max(len(parts) for parts in pieces.values()) > 1


def test_a_stop_word_ends_its_row_alone(make_folder):
    folder = make_folder()
    free = answers_of(folder)
    word = free[1].text[9:11]
    stopped = answers_of(folder, stop=[word])
    assert stopped[1].text == free[1].text[: free[1].text.index(word)]
    assert stopped[1].ended_by == "stop_word"
    assert stopped[1].forwards < free[1].forwards
    for index in (0, 2, 3):
        assert stopped[index].text == free[index].text.partition(word)[0]


def test_an_answer_has_at_most_the_tokens_asked_for(folder):
    for number in (1, 5, 8, 9):
        assert all(answer.tokens <= number for answer in answers_of(folder, max_tokens=number))


def test_chat_template_is_the_default_for_instruct_models_only(make_folder):
    with_template = load_tokenizer(make_folder("sdar"))
    without = load_tokenizer(make_folder("dream", template=None))
    assert use_chat_template(with_template, "SDAR-8B-Chat", None)
    assert not use_chat_template(with_template, "Dream-v0-Base-7B", None)
    assert not use_chat_template(without, "SDAR-8B-Chat", None)
    assert use_chat_template(with_template, "Dream-v0-Base-7B", True)
    assert not use_chat_template(with_template, "SDAR-8B-Chat", False)


def test_prompt_files_hold_texts_and_conversations(tmp_path):
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path.write_text('{"prompt": "a"}\n\n' + json.dumps({"messages": turns}) + "\n")
    assert read_prompts(path) == [Prompt(text="a"), Prompt(messages=tuple(turns))]
    (tmp_path / "one.txt").write_text("two\nlines\n")
    assert read_prompts(tmp_path / "one.txt") == [Prompt(text="two\nlines")]


def test_a_broken_prompt_file_names_every_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": 3}\n[1]\n{"prompt": "fine"}\n{\n{"messages": [{"role": "user"}]}\n')
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [f"{path}:{n}" for n in (1, 2, 4, 5)]


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(generate_command)

    def call(*arguments):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


def test_the_command_streams_one_answer(make_folder, invoke):
    folder = make_folder()
    (expected,) = answers_of(folder, ["Hello"])
    result = invoke("--model", folder, "Hello", "--max-tokens", 24)
    assert result.stdout == expected.text + "\n"
    assert "has a chat template" in result.stderr


def test_the_command_prints_one_json_object(make_folder, invoke, tmp_path):
    folder = make_folder("llada")
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "x"}\n{"messages": [{"role": "user", "content": "Hello"}]}\n')
    result = invoke("--model", folder, "What is 2+2?", "--prompts", file, "--json", "--max-tokens", 24, "--stats")
    content = json.loads(result.stdout)
    expected = answers_of(folder, ["What is 2+2?", "x", "Hello"])
    assert [row["text"] for row in content["rows"]] == [answer.text for answer in expected]
    assert content["forwards"] == sum(answer.forwards for answer in expected)
    assert "tokens/forward" in result.stderr


@pytest.mark.parametrize("method", ["herald", "mage-cpu-representative"])
@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_methods_of_block_causal_models_are_options(make_folder, invoke, method, family):
    """At full budget every method selects everything: its text is Dense's."""
    folder = make_folder(family)
    common = ("--model", folder, *PROMPTS, "--max-tokens", 24, "--json")
    dense = json.loads(invoke(*common).stdout)
    other = json.loads(invoke(*common, "--method", method, "--budget", 1.0).stdout)
    assert [row["text"] for row in other["rows"]] == [row["text"] for row in dense["rows"]]


def test_schedulers_and_caches_of_bidirectional_models_are_options(make_folder, invoke):
    folder = make_folder("dream")
    options = ("--scheduler", "dsb-greedy", "--cache", "dsb", "--block", 8, "--max-tokens", 16, "--json")
    content = json.loads(invoke("--model", folder, "Hello", *options).stdout)
    assert content["rows"][0]["tokens"] <= 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scheduler", "dsb-const"), "needs a bidirectional model"),
        (("--decoder", "confidance"), "did you mean 'confidence'"),
        (("--method", "harald"), "did you mean 'herald'"),
        (("--budget", "-1"), "budget must be >= 0"),
        (("--device", "cuda:99"), "torch sees"),
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("--dtype", "int4"), "unknown dtype 'int4'"),
        (("--threshold", "1.5"), "threshold must be <= 1"),
        (("--max-tokens", "0"), "max_new_tokens must be >= 1"),
        (("--max-tokens", "600"), "the limit is 512"),
        (("--batch", "0"), "batch must be >= 1"),
        (("--block", "0"), "block must be >= 1"),
        (("--temperature", "-1"), "temperature must be >= 0"),
        (("--stop", ""), "a stop word must not be empty"),
        (("--no-chat", "--system", "s"), "--system needs a chat template"),
    ],
)
def test_what_cannot_be_is_refused_in_words(make_folder, invoke, options, message):
    with pytest.raises(HeraldError, match=message):
        invoke("--model", make_folder(), "Hello", *options)


def test_no_prompt_says_how_to_give_one(make_folder, invoke):
    with pytest.raises(ConfigError, match="no prompt: give one as an argument"):
        invoke("--model", make_folder())


def test_weights_larger_than_memory_are_refused_before_loading(make_folder, monkeypatch, invoke):
    from herald_exec.checkpoints import memory

    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match="the weights do not fit on cpu"):
        invoke("--model", make_folder(), "Hello")


def test_a_model_known_by_shape_only_asks_for_its_folder(invoke):
    with pytest.raises(ConfigError, match="llada2-mini is known by its shape only; pass the folder with its weights"):
        invoke("--model", "llada2-mini", "Hello")
    with pytest.raises(ConfigError, match="did you mean 'herald-ref'"):
        invoke("--model", "herald-rev", "Hello")


def test_help_does_not_import_torch():
    modules = "herald_exec.generate_command, herald_exec.evaluation.harness_command"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("name", "content"), [("p.txt", ""), ("p.txt", "\n \n"), ("p.jsonl", ""), ("p.jsonl", "\n\n")])
def test_a_prompt_file_without_a_prompt_is_refused_before_the_model_is_looked_for(tmp_path, invoke, name, content):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"prompt file .*{name} holds no prompt: there is nothing to answer"):
        invoke("--model", tmp_path / "nowhere", "--prompts", path)


def test_a_blank_prompt_is_refused(tmp_path, invoke):
    with pytest.raises(ConfigError, match="prompt 2 is blank"):
        invoke("--model", tmp_path / "nowhere", "Hello", " ")
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: its prompt is blank"):
        read_prompts(path)


def test_settings_of_a_method_are_set_as_in_the_other_commands(make_folder):
    shape = open_checkpoint(make_folder()).shape
    settings = decode_settings(
        shape, **DEFAULTS, method="herald-sliding", sets=["settings.window_blocks=3"], budget=0.1
    )
    assert settings.method_settings == {"window_blocks": 3, "budget": 0.1}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["settings.window_block=3"], "did you mean 'settings.window_blocks'"),
        (["settings.block_length=4"], "has an option of its own here: --block"),
        (["settings.kv_dtype=fp8"], "has an option of its own here: --dtype"),
        (["settings.budget=0.1"], "budget is given twice"),
    ],
)
def test_a_setting_that_cannot_be_set_is_refused(make_folder, sets, message):
    shape = open_checkpoint(make_folder()).shape
    with pytest.raises(ConfigError, match=message):
        decode_settings(shape, **DEFAULTS, method="herald", budget=0.2, sets=sets)


def test_a_bidirectional_model_takes_no_setting_of_a_method(make_folder):
    shape = open_checkpoint(make_folder("llada")).shape
    with pytest.raises(ConfigError, match="is bidirectional: nothing would read it"):
        decode_settings(shape, **DEFAULTS, sets=["settings.queries=2"])


def test_a_block_longer_than_was_trained_is_warned_of_and_a_shorter_one_is_not(make_folder):
    shape = open_checkpoint(make_folder()).shape
    assert "was trained with blocks of 8" in untrained_block(shape, 9)
    assert untrained_block(shape, 8) is None
    assert untrained_block(shape, 4) is None
