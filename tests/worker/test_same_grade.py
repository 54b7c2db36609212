"""One response has one text and one grade: in training, in evaluations, in a chat, and in an audit of what is kept."""

import random

import pytest
import torch

from spmd_rl.data.response_text import ResponseText, end_tokens
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.text_stream import TextStream
from spmd_rl.data.tokens import encode_rendered, load_tokenizer, render_text
from spmd_rl.distributed.layout import RolloutLayout
from spmd_rl.distributed.sample import Sample
from spmd_rl.evaluation.benchmark import Benchmark, ask
from spmd_rl.rewards.audit import read_samples, score
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.rollout.requests import Completion
from spmd_rl.worker.rollouts import Rollouts
from tiny_tokenizer import CHAT_TEMPLATE, make_tokenizer

RULE = """
def seen(sample):
    words = (sample.prompt, sample.rendered, sample.response, sample.answer, sample.finish_reason, sorted(sample.row))
    numbers = (sample.prompt_ids, sample.response_ids, sample.tokens, sample.response_limit)
    return hash_of(repr((words, numbers)))

def hash_of(text):
    import hashlib
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little") / 2**48
"""
RULES = {"math_answer": 1.0, "format": 0.5, "strict_format": 0.2, "base_acc": 0.3, "repetition(ngram=3)": 0.1}
FORMS = (
    *("<think>why</think> <answer>\\boxed{%s}</answer>", "because</think><answer>%s</answer>", "\\boxed{%s}"),
    *(
        "The answer is **%s**, since it is.",
        "so \\frac{\\sqrt{3}}{%s}",
        "a b c a b c a b c %s",
        "(2, %s)",
        "ünï 让我 %s",
    ),
    *("<tool_call>%s</tool_call>", "  %s\n\n", "ünï 让我 %s", ""),
)
PROMPTS, SAMPLES, LIMIT = 30, 10, 64


class Spoken:
    """Stands for an engine that says what was written for it."""

    def __init__(self, responses, end):
        self.responses, self.end = responses, end

    def generate(self, requests, sampling, finished):
        for request in requests:
            ids = self.responses[request.id]
            tokens = Sample.of(
                request.id, torch.tensor(request.prompt), torch.tensor(ids), rollout_logprobs=torch.zeros(len(ids))
            )
            finished(Completion(tokens, "stop" if ids[-1] == self.end else "length", 0))


class OneRank:
    """Stands for the ranks as an evaluation asks them."""

    def __init__(self, rollouts):
        self.rollouts = rollouts

    def generate(self, split, rows, step, samples, sampling):
        return self.rollouts.generate(split, list(rows), step, samples, sampling).tickets, {}

    def rewards(self):
        self.rollouts.rewards()
        return {}, {"timing/non_overlap_rule_reward": 0.0}

    def conversations(self, ids, step):
        return self.rollouts.conversations(sorted(ids), step)

    def compare_answers(self, split, pairs):
        return [same for _, same in self.rollouts.compare_answers(split, pairs)]

    def forget(self):
        self.rollouts.made.clear()


@pytest.mark.long
@pytest.mark.parametrize(("special", "opened"), [(True, "<think>\n"), (False, "")], ids=["special tags", "added tags"])
def test_one_response_has_one_text_and_one_grade_wherever_it_is_graded(tmp_path, special, opened):
    make_tokenizer(tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    tokenizer.add_tokens(["<think>", "</think>", "<answer>", "</answer>", "<tool_call>"], special_tokens=special)
    template = CHAT_TEMPLATE.replace("assistant\n{%", f"assistant\n{opened}{{%")
    ends = tuple(end_tokens(tokenizer, "none"))
    asked = [f"What is {n}+4?" for n in range(PROMPTS)]
    texts = render_text(tokenizer, [[{"role": "user", "content": one}] for one in asked], template)
    prompts = [
        Prompt(n, tuple(ids), asked[n], str(n + 4), {"level": n})
        for n, ids in enumerate(encode_rendered(tokenizer, texts))
    ]
    draw, responses, words = random.Random(7), {}, {}
    for n in range(PROMPTS * SAMPLES):
        form, right = draw.choice(FORMS), str(n // SAMPLES + 4)
        words[n] = form % draw.choice([right, f"{right}.0", "8", f"\\frac{{{right}}}{{1}}"]) if "%s" in form else form
        responses[n] = [*encode_rendered(tokenizer, [words[n]])[0], *draw.choice([ends[:1], ()])] or [*ends[:1]]
    (tmp_path / "rule.py").write_text(RULE)
    rules = RULES | {f"{tmp_path / 'rule.py'}:seen": 0.01}
    sampling = SamplingParams(1.0, LIMIT)
    with GraderPool(rules) as pool:
        engine, splits = Spoken(responses, ends[0]), {"train": prompts, "eval": prompts}
        rollouts = Rollouts(
            engine, RolloutLayout(1, 1), 0, splits, tokenizer, pool, 1, ResponseText(tokenizer, ends), {}
        )
        rollouts.generate("train", range(PROMPTS), 1, SAMPLES, sampling)
        graded = rollouts.rewards()
        trained = {one.id: one for one in graded.scored}
        assert graded.thinking == sum("</think>" in word for word in words.values()) > 0
        assert graded.responses == len(words) and rollouts.rewards().responses == 0
        rollouts.write_conversations(str(tmp_path / "run" / "samples"), 1)
        rollouts.made.clear()
        lines, _ = ask(OneRank(rollouts), Benchmark("sums", "eval", PROMPTS), 0, SAMPLES, sampling)
    evaluated = [sample for line in lines for sample in line["samples"]]
    stored, skipped = read_samples(tmp_path / "run", LIMIT)
    audited = score(stored, rules, 1, 10.0)
    assert len(trained) == len(evaluated) == len(audited) == PROMPTS * SAMPLES and not skipped
    assert len({one.cause for one in trained.values()}) >= 4
    for n, one in trained.items():
        assert stored[n].sample.response == evaluated[n]["response"] == words[n]
        stream = TextStream(tokenizer, ends)
        assert "".join([*(stream.add([id]) for id in responses[n]), stream.add([], last=True)]) == words[n]
        assert evaluated[n]["cause"] == audited[n].cause == one.cause
        assert (audited[n].reward, audited[n].scores) == (one.reward, one.scores)
