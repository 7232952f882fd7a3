"""The tokenizer: digits apart, special ids, and the fast encoder equal to the library."""

import pytest
from transformers import PreTrainedTokenizerFast

from herald_exec.checkpoints.tokenizer import load_tokenizer
from herald_exec.reference.vocabulary import EOS, MASK, PAD, SPECIAL_TOKENS, write_tokenizer

TEXTS = [
    " the code of amber falcon is 48213, as noted above.",
    '\nQuestion: a_b = (12)\n  x["k"]: 7;\n\n\n   end ',
    "",
    "unseen wörds? no: plain",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_encoder_cuts_and_encodes_as_the_library_does(material, text):
    plain = text.encode("ascii", "ignore").decode()
    assert material.encoder(plain) == material.encoder.tokenizer.encode(plain, add_special_tokens=False).ids
    assert material.encoder.decode(material.encoder(plain)) == plain


def test_every_digit_is_one_token(material):
    assert len(material.encoder("48213")) == 5


def test_special_tokens_have_the_first_ids(material):
    assert [material.encoder.tokenizer.token_to_id(text) for text in SPECIAL_TOKENS] == [EOS, MASK, PAD] == [0, 1, 2]


def test_hugging_face_and_our_loader_read_the_written_files_alike(material, tmp_path):
    write_tokenizer(tmp_path, material.encoder.tokenizer, 512)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "Some text.\nQuestion: What is the code of amber?"}]
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(messages) == expected == material.encoder(f"{messages[0]['content']}\nAnswer:")
    assert (theirs.eos_token_id, theirs.mask_token_id, theirs.pad_token_id) == (0, 1, 2)
