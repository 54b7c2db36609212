"""The reward models on one rank: what they read of the rank's samples, and what they say of those they are given."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from os.path import commonprefix

import torch

from spmd_rl.config.check_reward_models import read_reward_shape
from spmd_rl.config.config import Config
from spmd_rl.data.answers import Judged
from spmd_rl.data.reward_model_reading import Reader
from spmd_rl.distributed.sample import Sample
from spmd_rl.distributed.verb import verb
from spmd_rl.worker.rollouts import Made
from spmd_rl.worker.trainer import MicroBatches, Routes, Trainer


def reading(id: int, tokens: Sequence[int], shared: int) -> Sample:
    """Lay a text [L] out as a sample whose one loss token is predicted by the text's last token.

    Its first `shared` tokens (at least one) are its prompt: those that it has in common with its group. One more token
    follows, which is never laid down, because the last one of a response isn't.
    """
    mask = torch.zeros(len(tokens) - shared + 1, dtype=torch.bool)
    mask[-1] = True
    return Sample(id, torch.tensor([*tokens, tokens[-1]], dtype=torch.int32), shared, mask)


class RewardModelScorer:
    """Reads on the ranks that made the samples, scores on the ranks of the training layout."""

    def __init__(self, config: Config, readers: Mapping[str, Reader], trainer: Trainer, made: Mapping[int, Made]):
        self.readers, self.trainer, self.made = readers, trainer, made
        self.readings: dict[int, Sample] = {}
        """Of the model that was the last to read."""
        for name in readers:
            model = config.reward.models[name]
            shape = read_reward_shape(name, model)
            assert shape.head == "value" and 0 <= (model.label or 0) < shape.labels
            trainer.add(_name(name), trainer.built(model.path, shape, model.dtype, model.label or 0))

    @verb
    def read(self, model: str) -> list[tuple[int, int, int]]:
        """Keep this rank's samples as a model reads them.

        Returns of each its id, the tokens that it has in common with its prompt's other samples, and those after them.

        In other words than the policy's, a prompt and its responses may meet inside a token: what samples of a prompt
        share is what their tokens do.
        """
        made = self.made
        ids = sorted(made)
        read = self.readers[model].read_all(
            [made[i].prompt for i in ids],
            [made[i].completion.sample.response.tolist() for i in ids],
            [made[i].text for i in ids],
        )
        groups: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for sample, tokens in zip(ids, read, strict=True):
            groups[id(made[sample].prompt)].append((sample, tokens))
        self.readings = {}
        for members in groups.values():
            shared = max(1, len(commonprefix([tokens for _, tokens in members])))
            self.readings |= {sample: reading(sample, tokens, shared) for sample, tokens in members}
        return [(one.id, one.prompt_tokens, len(one.response) - 1) for one in self.readings.values()]

    @verb
    def judge(self, model: str, routes: Routes, minibatches: Sequence[MicroBatches], share_prompts: bool) -> Judged:
        """Return the scores of the samples that this rank reports; see Trainer.bring."""
        readings, self.readings = self.readings, {}
        [packs], _, sent = self.trainer.bring(readings, routes, minibatches, share_prompts)
        found, seconds = self.trainer.forward(_name(model), packs)
        scores = [
            (sample.id, score)
            for packed, values in found
            if self.trainer.place.reports
            for sample, score in zip(packed.samples, values.tolist(), strict=True)
        ]
        return Judged(scores, sent, seconds)


def _name(model: str) -> str:
    """Return the name of a reward model among the models of a rank."""
    return f"reward model {model}"
