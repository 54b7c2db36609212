"""Tokens one by one are the text of all of them."""

import pytest

from spmd_rl.data.text_stream import TextStream
from spmd_rl.data.tokens import decode, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_models):
    """One token a byte: most characters below take several."""
    return load_tokenizer(tiny_models["llama"])


@pytest.mark.parametrize("text", ["plain words", "ünï çödé", "让我重新检查 🤔🤔 ok", "", "  two  spaces\n\n"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_pieces_joined_are_the_text_and_no_piece_has_half_a_character(tokenizer, text, size):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.add(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.add([], last=True) == ""


def test_bytes_that_become_no_character_are_shown_at_the_end(tokenizer):
    ids = tokenizer("ab🤔", add_special_tokens=False)["input_ids"][:-1]
    stream = TextStream(tokenizer)
    assert [stream.add([one]) for one in ids] == ["a", "b", "", "", ""]
    assert stream.add([], last=True) == "\ufffd"
    assert decode(tokenizer, ids) == "ab\ufffd"


def test_end_tokens_are_not_shown(tokenizer):
    stream = TextStream(tokenizer)
    assert stream.add([*tokenizer("hi", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]) == "hi"
