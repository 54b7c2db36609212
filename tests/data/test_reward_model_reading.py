"""Test what a reward model sees of a sample."""

from types import SimpleNamespace

import pytest

from spmd_rl.data.reward_model_reading import make_reader
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.tokens import load_tokenizer, render
from tiny_tokenizer import CHAT_TEMPLATE, make_tokenizer

END = 2
KNOB = "reward.models.helpful"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The policy's, one that is equal, one with other ids, and one with other ids and another template."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, vocabulary in (("policy", 515), ("equal", 515), ("longer", 600), ("foreign", 400)):
        make_tokenizer(root / name, vocabulary)
    found = {name: load_tokenizer(str(root / name)) for name in ("policy", "equal", "longer", "foreign")}
    found["foreign"].chat_template = (
        "{% for message in messages %}[{{ message.role }}] {{ message.content | trim }} {% endfor %}"
        "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
    )
    return SimpleNamespace(**found)


def asked(tokenizer, *messages):
    said = [{"role": role, "content": text} for role, text in messages]
    return Prompt(0, tuple(render(tokenizer, said)), said[-1]["content"], "", {}, messages=tuple(said))


def reader(own, policy, reads="auto", vocabulary=515, prompts=None):
    prompts = prompts or [asked(policy, ("user", text)) for text in ("Hi", "You")]
    return make_reader(KNOB, reads, own, policy, vocabulary, prompts)


def test_with_the_policys_tokenizer_and_template_the_ids_are_the_policys_own(tokenizers):
    policy = tokenizers.policy
    prompt, answer = asked(policy, ("system", "Be brief."), ("user", "Hi")), policy("Hello")["input_ids"]
    read = reader(tokenizers.equal, policy)
    assert read.reads == "tokens"
    finished, cut = read.read_all([prompt, prompt], [[*answer, END], answer], ["never", "read"])
    assert finished[: len(prompt.token_ids) + len(answer)] == [*prompt.token_ids, *answer]
    # The turn is ended as the template ends it, once, whether or not the policy has begun to.
    newline = policy("\n")["input_ids"]
    assert finished == cut == [*prompt.token_ids, *answer, END, *newline]


def test_both_ways_of_reading_see_the_same_where_text_and_ids_say_the_same(tokenizers):
    policy = tokenizers.policy
    prompt, answer = asked(policy, ("user", "Hi")), policy("Hello")["input_ids"]
    ways = [reader(tokenizers.equal, policy, reads) for reads in ("tokens", "conversation")]
    by_ids, by_text = (way.read_all([prompt], [[*answer, END]], ["Hello"]) for way in ways)
    assert by_ids == by_text


def test_another_tokenizer_or_template_reads_the_conversation_in_its_own(tokenizers):
    policy, foreign = tokenizers.policy, tokenizers.foreign
    prompt = asked(policy, ("system", "Be brief."), ("user", "Hi"))
    read = reader(foreign, policy, vocabulary=400)
    assert read.reads == "conversation"
    [ids] = read.read_all([prompt], [[1, 2, 3]], [" Hello\n"])
    assert foreign.decode(ids) == "[system] Be brief. [user] Hi [assistant] Hello <|endoftext|>"
    assert reader(tokenizers.longer, policy, vocabulary=600).reads == "conversation"


def test_a_prompt_that_is_no_conversation_is_read_as_a_message_of_the_user(tokenizers):
    policy = tokenizers.policy
    prompt = Prompt(0, (7, 8), "Hi", "", {})
    [ids] = reader(tokenizers.equal, policy, prompts=[prompt]).read_all([prompt], [[9]], ["Hello"])
    assert policy.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"


def test_without_templates_on_either_side_ids_are_read_as_they_are(tokenizers, tmp_path):
    make_tokenizer(tmp_path)
    bare = load_tokenizer(str(tmp_path))
    bare.chat_template = None
    prompt = Prompt(0, (7, 8), "Hi", "", {})
    read = reader(bare, bare, prompts=[prompt])
    assert read.reads == "tokens"
    assert read.read_all([prompt], [[9]], ["x"]) == [[7, 8, 9]]


def test_one_source_that_is_spelled_otherwise_has_all_read_as_conversations(tokenizers):
    policy = tokenizers.policy
    prompts = [asked(policy, ("user", str(i))) for i in range(500)]
    assert reader(tokenizers.equal, policy, prompts=prompts).reads == "tokens"
    otherwise = [Prompt(i, tuple(policy(f"Q: {i}")["input_ids"]), str(i), "", {}) for i in range(100)]
    assert reader(tokenizers.equal, policy, prompts=prompts + otherwise).reads == "conversation"


def test_ids_beyond_the_reward_models_vocabulary_are_nothing(tokenizers):
    policy = tokenizers.policy
    read = reader(tokenizers.equal, policy, vocabulary=510)
    [ids] = read.read_all([asked(policy, ("user", "Hi"))], [[100, 512, 101, END]], [""])
    assert 512 not in ids and ids[-4:-2] == [100, 101]


@pytest.mark.parametrize(
    "name, template, reads, said",
    [
        ("longer", CHAT_TEMPLATE, "tokens", "reads = tokens: its tokenizer, in "),
        ("equal", None, "auto", "has no chat template; add chat_template.jinja"),
        ("equal", "{{ messages[0].content }}", "conversation", "leaves out the answer"),
        ("equal", "{{ raise_exception('no') }}", "auto", "can't render a question and an answer"),
    ],
)
def test_what_cannot_be_read_is_said_with_the_model_and_the_way_out(tokenizers, tmp_path, name, template, reads, said):
    make_tokenizer(tmp_path, 600 if name == "longer" else 515)
    own = load_tokenizer(str(tmp_path))
    own.chat_template = template
    with pytest.raises(ValueError, match=KNOB) as caught:
        reader(own, tokenizers.policy, reads)
    assert said in str(caught.value)
