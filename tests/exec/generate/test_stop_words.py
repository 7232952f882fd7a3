"""Stop words in streamed text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_exec.stop_words import StopWords
from herald_pipeline.errors import ConfigError


def streamed(text, words, cuts):
    stop, shown, rest = StopWords(words), [], text
    for cut in [*cuts, len(text)]:
        shown.append(stop.push(rest[:cut]))
        rest = rest[cut:]
    return [*shown, stop.finish()], stop.found


@given(
    text=st.text("ab", max_size=30),
    words=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=20),
)
def test_the_text_ends_at_the_first_stop_word_wherever_pieces_are_cut(text, words, cuts):
    pieces, found = streamed(text, words, cuts)
    places = [text.index(word) for word in words if word in text]
    if found is None:
        assert not places
        assert "".join(pieces) == text
    else:
        # A longer word may begin earlier but be completed later; shown text never holds a whole stop word.
        assert text.startswith("".join(pieces) + found)
        assert not any(word in "".join(pieces) for word in words)


def test_a_beginning_of_a_stop_word_is_held_back_until_it_is_decided():
    stop = StopWords(["\n\nQ:"])
    assert stop.push("answer\n") == "answer"
    assert stop.push("\nmore") == "\n\nmore"
    assert stop.push("\n\n") == ""
    assert stop.push("Q: next") == ""
    assert stop.found == "\n\nQ:"
    assert stop.push("x") == stop.finish() == ""


def test_what_was_held_back_is_shown_at_the_end():
    stop = StopWords(["END"])
    assert stop.push("the EN") == "the "
    assert stop.finish() == "EN"


def test_an_empty_stop_word_is_refused():
    with pytest.raises(ConfigError, match="must not be empty"):
        StopWords(["a", ""])
