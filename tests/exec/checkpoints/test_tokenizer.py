"""Tokenizer files and chat templates, against ``transformers`` reading the same files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from herald_exec.checkpoints.tokenizer import TextStream, load_tokenizer
from herald_pipeline.errors import ConfigError

CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ '<|im_start|>' + message.role + '\\n' + message['content'] | trim + eos_token + '\\n' }}\n"
    "{%- if loop.first %}{% continue %}{% endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{% generation %}<|im_start|>assistant\n{% endgeneration %}{% endif %}"
)
TEXTS = [
    "It's 12345 tokens,  with   spaces\n\n and\ttabs.",
    "naïve café — 汉字 😀 e\u0301",
    "<|im_start|>user\nhello<|endoftext|>",
    "",
    " leading",
]
CORPUS = ["the quick brown fox jumps over the lazy dog's 100 cats", "汉字 naïve café 😀", "it's we'll they've"] * 5


def trained():
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


ADDED = {"content": "<|endoftext|>", "special": True, "normalized": False}


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    """vocab.json, merges.txt and tokenizer_config.json, as SDAR and Dream are published."""
    folder = tmp_path_factory.mktemp("qwen")
    tokenizer = trained()
    tokenizer.model.save(str(folder))
    size = tokenizer.get_vocab_size()
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|endoftext|>",
        "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "bos_token": None,
        "chat_template": CHATML,
        "added_tokens_decoder": {
            str(size): ADDED,
            str(size + 1): ADDED | {"content": "<|im_start|>"},
            str(size + 2): ADDED | {"content": "<tool>", "special": False},
            str(size + 3): ADDED | {"content": "<|MASK|>"},
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def json_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    tokenizer = trained()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_vocabulary_and_merges_give_the_stock_ids(qwen_folder, text):
    stock = Qwen2Tokenizer.from_pretrained(qwen_folder)
    ours = load_tokenizer(qwen_folder)
    assert ours.encode(text) == stock.encode(text)
    assert ours.token_id("<|MASK|>") == stock.convert_tokens_to_ids("<|MASK|>")
    assert ours.vocab_size == len(stock)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_json_gives_the_stock_ids(json_folder, text):
    stock = PreTrainedTokenizerFast.from_pretrained(json_folder)
    assert load_tokenizer(json_folder).encode(text) == stock.encode(text)


@pytest.mark.parametrize("which", ["qwen_folder", "json_folder"])
def test_chat_template_renders_as_the_stock_one_does(which, request):
    folder = request.getfixturevalue(which)
    kind = Qwen2Tokenizer if which == "qwen_folder" else PreTrainedTokenizerFast
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "why?"}]
    stock = kind.from_pretrained(folder)
    expected = stock.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ours = load_tokenizer(folder)
    assert ours.has_chat_template
    assert ours.encode_chat(messages) == stock.encode(expected, add_special_tokens=False)
    assert ours.decode(ours.encode_chat(messages), skip_special_tokens=False) == expected


def test_a_named_default_template_is_taken(json_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text((json_folder / "tokenizer.json").read_text())
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "hi"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    ours = load_tokenizer(tmp_path)
    assert ours.decode(ours.encode_chat([])) == "hi"


def test_template_that_refuses_says_its_own_words(json_folder):
    with pytest.raises(ConfigError, match="the chat template refuses the messages: no tools here"):
        load_tokenizer(json_folder).encode_chat([{"role": "tool", "content": ""}])


def test_template_that_cannot_be_parsed_says_where(json_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text((json_folder / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(ConfigError, match=r"no valid jinja2 \(line 2"):
        load_tokenizer(tmp_path)


def test_template_cannot_reach_python(json_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text((json_folder / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ConfigError, match="refuses"):
        load_tokenizer(tmp_path).encode_chat([])


def test_no_tokenizer_files(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer: neither tokenizer\.json nor vocab"):
        load_tokenizer(tmp_path)


def test_damaged_tokenizer_json(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match="is no tokenizer"):
        load_tokenizer(tmp_path)


def test_added_tokens_that_do_not_follow_the_vocabulary_are_refused(qwen_folder, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text((qwen_folder / name).read_text())
    config = {"added_tokens_decoder": {"9999": ADDED}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="should have id 9999"):
        load_tokenizer(tmp_path)


def test_without_template_chat_names_the_way_out(tmp_path, json_folder):
    (tmp_path / "tokenizer.json").write_text((json_folder / "tokenizer.json").read_text())
    ours = load_tokenizer(tmp_path)
    assert not ours.has_chat_template
    with pytest.raises(ConfigError, match="--no-chat"):
        ours.encode_chat([])


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=30))
def test_streamed_pieces_join_to_the_text_and_end_on_characters(qwen_folder, text, cuts):
    ours = load_tokenizer(qwen_folder)
    ids = ours.encode(text)
    expected = ours.decode(ids)
    stream, pieces, rest = TextStream(ours), [], ids
    for cut in [*cuts, len(ids)]:
        pieces.append(stream.push(rest[:cut]))
        rest = rest[cut:]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join([*pieces, stream.finish()]) == expected


def test_a_character_cut_in_two_waits_for_its_second_half(qwen_folder):
    ours = load_tokenizer(qwen_folder)
    smile = "\U0001f680"
    ids = ours.encode(smile)
    assert len(ids) > 1
    stream = TextStream(ours)
    assert stream.push(ids[:-1]) == ""
    assert stream.push(ids[-1:]) == smile
