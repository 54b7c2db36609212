"""Test what is typed, and what is thought."""

import itertools

import pytest
from PIL import Image

from spmd_rl.chat.conversation import HELP, Conversation, Thoughts
from spmd_rl.data.sampling_params import SamplingParams


@pytest.fixture
def talk():
    found = Conversation(SamplingParams(0.7, 100), seed=1, system="Be brief.")
    found.answered("one?", "1")
    return found


def test_a_question_comes_after_the_system_message_and_all_turns(talk):
    assert [(m["role"], m["content"]) for m in talk.asked("two?")] == [
        ("system", "Be brief."),
        ("user", "one?"),
        ("assistant", "1"),
        ("user", "two?"),
    ]


def test_reset_keeps_the_system_message_and_system_replaces_it(talk):
    talk.obey("/reset")
    assert [m["role"] for m in talk.asked("x")] == ["system", "user"]
    talk.answered("x", "y")
    talk.obey("/system Answer in French.")
    assert [m["content"] for m in talk.asked("z")] == ["Answer in French.", "z"]
    talk.obey("/system")
    assert [m["role"] for m in talk.asked("z")] == ["user"]


def test_exit_leaves_and_help_helps(talk):
    assert talk.obey("/exit") is None and talk.obey("/quit") is None
    assert talk.obey("/help") == HELP


def test_settings_change_together_and_are_shown(talk):
    said = talk.obey("/set temperature=0 top_p=0.9 max-tokens=7 seed=3")
    assert talk.sampling == SamplingParams(0.0, 7, 0.9) and talk.seed == 3
    assert said == talk.obey("/set") == "(temperature=0, top_p=0.9, top_k=0, min_p=0, max_tokens=7, seed=3)"


@pytest.mark.parametrize(
    "line, said",
    [
        ("/set temperatur=1", "temperatur=1: expected NAME=VALUE, with a name among temperature"),
        ("/set temperature", "expected NAME=VALUE"),
        ("/set temperature=hot", "expected a number"),
        ("/set top_k=1.5", "expected a whole number"),
        ("/set temperature=-1", "out of range; it must be 0 or more (0: greedy)"),
        ("/set temperature=nan", "out of range"),
        ("/set top_p=0", "out of range; it must be above 0 and at most 1"),
        ("/set temperature=0.5 max_tokens=0", "out of range; it must be 1 or more"),
        ("/forget", "there is no such command; /help"),
    ],
)
def test_what_cannot_be_set_is_said_and_nothing_is_set(talk, line, said):
    before = talk.sampling
    assert said in talk.obey(line)
    assert talk.sampling == before


TEXT = "a < b <think>first <thin> then</thi</think>so </think> 2 <think>more"


@pytest.mark.parametrize("size", range(1, 12))
def test_thoughts_are_told_apart_however_the_text_is_cut(size):
    thoughts = Thoughts(thinking=False)
    found = [part for at in range(0, len(TEXT), size) for part in thoughts.add(TEXT[at : at + size])] + thoughts.end()
    grouped = [
        ("".join(text for text, _ in group), thought) for thought, group in itertools.groupby(found, lambda one: one[1])
    ]
    assert grouped == [
        ("a < b ", False),
        ("<think>first <thin> then</thi</think>", True),
        ("so </think> 2 ", False),
        ("<think>more", True),
    ]


def test_a_prompt_that_opens_a_thought_begins_with_one():
    thoughts = Thoughts(thinking=True)
    assert [*thoughts.add("hm</think>"), *thoughts.add("2"), *thoughts.end()] == [("hm</think>", True), ("2", False)]


def test_text_that_ends_like_a_tag_is_shown_in_the_end():
    thoughts = Thoughts(thinking=False)
    assert thoughts.add("1 <thi") == [("1 ", False)]
    assert thoughts.end() == [("<thi", False)]


def test_a_picture_is_shown_with_the_next_question_and_stays_in_the_conversation(tmp_path):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red square.png")
    talk = Conversation(SamplingParams(0.7, 100), seed=1, most_pictures=2)
    assert "40 x 30 pixels" in talk.obey(f"/image {tmp_path / 'red square.png'}")
    said = [{"type": "image"}, {"type": "text", "text": "Which colour?"}]
    assert talk.asked("Which colour?")[0]["content"] == said
    talk.answered("Which colour?", "red")
    assert [message["content"] for message in talk.asked("Sure?")] == [said, "red", "Sure?"]
    assert len(talk.pictures) == 1
    talk.obey("/reset")
    assert talk.pictures == [] and talk.asked("x")[0]["content"] == "x"


def test_what_cannot_be_shown_is_said_and_changes_nothing(tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    talk = Conversation(SamplingParams(0.7, 100), seed=1, most_pictures=1)
    assert "no PNG, JPEG, WEBP picture" in talk.obey(f"/image {tmp_path / 'text.png'}")
    assert "No such file" in talk.obey(f"/image {tmp_path / 'none.png'}")
    assert "nothing is shown" in talk.obey("/image")
    talk.obey(f"/image {tmp_path / 'red.png'}")
    assert "at most 1 pictures" in talk.obey(f"/image {tmp_path / 'red.png'}")
    assert len(talk.pictures) == 1
    blind = Conversation(SamplingParams(0.7, 100), seed=1)
    assert blind.obey(f"/image {tmp_path / 'red.png'}") == "(this model sees no pictures)"
