"""Tasks of reasoning_gym."""

from importlib.util import find_spec

import pytest

from spmd_rl.config.config import Config, ModelConfig
from spmd_rl.config.data_config import DataConfig, DatasetConfig
from spmd_rl.config.loading import load_dataset_config
from spmd_rl.data.sources.prompts import load_dataset, load_prompts
from spmd_rl.data.sources.tasks import make_task

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed")


class Tokenizer:
    """A token a word."""

    chat_template = "yes"

    def apply_chat_template(self, conversations, tokenize, add_generation_prompt):
        return [messages[-1]["content"] for messages in conversations]

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[1] * len(text.split()) for text in texts]}


def test_problems_follow_the_seed_and_no_problem_is_in_both_splits():
    train = [make_task("basic_arithmetic", {}, 300, seed, "train") for seed in (1, 1, 2)]
    held_out = [make_task("basic_arithmetic", {}, 100, seed, "eval") for seed in (1, 2)]
    assert train[0] == train[1] != train[2]
    assert [len(rows) for rows in (*train, *held_out)] == [300, 300, 300, 100, 100]
    asked, kept = ({row["prompt"] for rows in some for row in rows} for some in (train, held_out))
    assert asked.isdisjoint(kept)
    assert len({row["prompt"] for row in train[0]}) == 300


def test_the_tasks_own_scoring_takes_the_rows():
    import reasoning_gym

    row = make_task("leg_counting", {"max_animals": 3}, 1, 1, "train")[0]
    score = reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])
    assert score(row["answer"], row) == 1.0


def test_a_run_trains_on_a_task_and_evaluates_on_other_problems_of_it():
    config = Config(ModelConfig("m"), DataConfig(source="reasoning_gym:leg_counting", eval_problems=20))
    train, held_out = (load_prompts(config, Tokenizer(), split).prompts for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (2000, 20)
    assert train[0].source == "leg_counting" and train[0].row["metadata"]["animals"]
    assert {p.text for p in train}.isdisjoint({p.text for p in held_out})


def test_options_and_the_number_of_problems_are_the_datasets(tmp_path):
    file = tmp_path / "legs.yaml"
    file.write_text("source: reasoning_gym:leg_counting\nproblems: 5\noptions: {min_animals: 2, max_animals: 2}\n")
    loaded = load_dataset(load_dataset_config(str(file)), DataConfig(), Tokenizer(), 1, "train", None)
    assert [len(p.row["metadata"]["animals"]) for p in loaded.prompts] == [2] * 5


def test_a_task_with_few_problems_says_so():
    dataset = DatasetConfig("reasoning_gym:leg_counting", options={"max_animals": 1, "min_animals": 1}, problems=2000)
    loaded = load_dataset(dataset, DataConfig(), Tokenizer(), 1, "train", None)
    assert len(loaded.prompts) < 2000 and "different problems for train, not 2000" in loaded.notes[0]


@pytest.mark.parametrize(
    "task, options, said",
    [
        ("leg_count", {}, "did you mean leg_counting?"),
        ("zzzz", {}, "it has .*leg_counting"),
        ("leg_counting", {"legs": 3}, "its options {'legs': 3} do not fit"),
        ("leg_counting", {"min_animals": 9, "max_animals": 2}, "its options .* do not fit"),
    ],
)
def test_what_a_task_is_not_is_refused(task, options, said):
    with pytest.raises(ValueError, match=said):
        make_task(task, options, 3, 1, "train")
