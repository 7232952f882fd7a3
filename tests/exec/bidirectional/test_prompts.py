"""Prompt files and the judging of answers."""

import json

import pytest

from herald_exec.bidirectional.prompts import MATCHES, Item, is_correct, random_items, read_items
from herald_pipeline.errors import ConfigError


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_tokens_and_answers_are_read_and_empty_lines_skipped(tmp_path):
    path = write(tmp_path, {"tokens": [1, 2], "answer": [3]}, "", {"tokens": [4]})
    assert read_items(path) == [Item((1, 2), (3,)), Item((4,))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ({"text": "a"}, 'line 2: need an object with "prompt"'),
        ({"prompt": "a"}, "line 2: a text prompt needs a checkpoint folder with a tokenizer"),
        ({"tokens": "12"}, "line 2: tokens must be a list of token ids"),
        ({"tokens": [1, True]}, "line 2: tokens must be a list of token ids"),
        ({"tokens": [1], "answer": 3}, "line 2: answer must be a list of token ids"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line, message):
    path = write(tmp_path, {"tokens": [1]}, line)
    with pytest.raises(ConfigError, match=message):
        read_items(path)


def test_a_missing_and_an_empty_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"prompts file .*none.jsonl cannot be read: no such file or directory$"):
        read_items(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_items(write(tmp_path, ""))


def test_a_file_that_holds_no_text_is_refused_in_words(tmp_path):
    (tmp_path / "photo.jsonl").write_bytes(bytes([0xFF, 0xD8, 0xFF]))
    with pytest.raises(ConfigError, match="cannot be read: it holds no UTF-8 text"):
        read_items(tmp_path / "photo.jsonl")


def test_answers_in_ids_are_compared_whole_without_end_tokens():
    item = Item((1,), (5, 6, 94))
    assert is_correct(item, [5, 6, 94], None, "exact", (94,)) is True
    assert is_correct(item, [5, 6], None, "exact", (94,)) is True
    assert is_correct(item, [5, 6, 7, 94], None, "exact", (94,)) is False
    assert is_correct(Item((1,)), [5], None, "exact", ()) is None


@pytest.mark.parametrize(
    ("match", "given", "wanted", "right"),
    [
        ("exact", " a b ", "a b", True),
        ("exact", "a b c", "a b", False),
        ("contains", "x = 12.", "12", True),
        ("last-number", "3 and 4 give 1,234.", "#### 1234", True),
        ("last-number", "no number", "12", False),
        ("last-number", "it is 12.5", "12", False),
    ],
)
def test_text_answers(match, given, wanted, right):
    assert MATCHES[match](given, wanted) is right


def test_an_unknown_match_is_answered_with_the_closest():
    with pytest.raises(ConfigError, match="unknown match 'exakt'; did you mean 'exact'"):
        is_correct(Item((1,), (2,)), [2], None, "exakt", ())


def test_random_prompts_hold_ordinary_tokens_and_are_the_seeds(llada):
    items = random_items(llada.shape, 3, 500, seed=1)
    tokens = {token for item in items for token in item.prompt}
    assert [len(item.prompt) for item in items] == [500] * 3
    assert tokens == set(range(94))
    assert items == random_items(llada.shape, 3, 500, seed=1)
    assert items != random_items(llada.shape, 3, 500, seed=2)
