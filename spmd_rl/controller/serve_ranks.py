"""The verbs of the programs that only generate, as rank 0 tells them."""

from collections.abc import Sequence

from spmd_rl.config.names import Verb
from spmd_rl.controller.ranks import ChannelProtocol, Ranks, WorkerProtocol
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.distributed.verb import verb


class Servers:
    """All ranks, rank 0 included, each with an engine and no trainer.

    `ranks`: the verbs that they share with ranks that train: generate, rewards, compare_answers, conversations, forget
    and stop.
    """

    def __init__(self, commands: ChannelProtocol, worker: WorkerProtocol):
        self.ranks = Ranks(commands, worker)

    @verb
    def load(self, model: str) -> None:
        """Fill the engines from a Hugging Face directory or a checkpoint, in place of what they held."""
        self.ranks._all(Verb.LOAD, model=model)

    @verb
    def reply(self, prompt: Sequence[int], seed: int, sampling: SamplingParams, pictures: Sequence[bytes] = ()) -> str:
        """One answer by the one engine that all ranks are; rank 0's worker hears its tokens.

        `pictures`: files that the prompt shows. Returns why it ended: `stop`, `length` or `abort`.
        """
        return self.ranks._all(Verb.REPLY, prompt=list(prompt), seed=seed, sampling=sampling, pictures=list(pictures))
