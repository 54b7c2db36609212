"""Names that settings, metrics, reports and code share: what all ranks do, and where in a step they are."""

from enum import StrEnum


class Verb(StrEnum):
    """Name what rank 0 has the ranks do."""

    TO_ROLLOUT = "to_rollout"
    TO_TRAINING = "to_training"
    GENERATE = "generate"
    REWARDS = "rewards"
    COMPARE_ANSWERS = "compare_answers"
    READ = "read"
    JUDGE = "judge"
    KEEP_REWARDS = "keep_rewards"
    EXCHANGE = "exchange"
    PUT = "put"
    ESTIMATE_GAE = "estimate_gae"
    WHITEN = "whiten"
    SCORE = "score"
    SAMPLE_KL = "sample_kl"
    LEARN = "learn"
    CONVERSATIONS = "conversations"
    WRITE_CONVERSATIONS = "write_conversations"
    FORGET = "forget"
    COSTS = "costs"
    EXPORT_HF = "export_hf"
    CHECKPOINT_BYTES = "checkpoint_bytes"
    BEGIN_CHECKPOINT = "begin_checkpoint"
    CHECKPOINT_PROGRESS = "checkpoint_progress"
    CHECKPOINT_FILES = "checkpoint_files"
    CHECKPOINT_DIGESTS = "checkpoint_digests"
    COMPLETE_CHECKPOINT = "complete_checkpoint"
    LOAD = "load"
    REPLY = "reply"
    STOP = "stop"


class Phase(StrEnum):
    """Name where in a run a rank is; all but START and BETWEEN are timed, as timing/<phase>."""

    START = "start"
    """All that comes before the first verb."""
    BETWEEN = "between phases"
    EVALUATION = "evaluation"
    TO_ROLLOUT = "reshard_to_infer"
    ROLLOUT = "rollout"
    TO_TRAINING = "reshard_to_train"
    REWARD_MODEL = "reward_model"
    ADVANTAGE = "adv"
    EXCHANGE = "exchange"
    POLICY_LOGPROBS = "old_log_p"
    REFERENCE_LOGPROBS = "reference_model"
    CRITIC_VALUES = "critic_model"
    CRITIC_UPDATE = "update_critic"
    UPDATE = "update"
    CHECKPOINT = "checkpoint"
    EXPORT = "export"


ALIASES = {
    "timing/reshard_to_infer": "timing/resharding_to_infer",
    "timing/reshard_to_train": "timing/resharding_to_train",
    "timing/reference_onload": "timing/ref_onload",
    "timing/reference_offload": "timing/ref_offload",
    # None of them is ever hidden behind other work.
    "timing/reference_model": "timing/non_overlap_reference_model",
    "timing/adv": "timing/non_overlap_adv",
    "timing/reward_model": "timing/non_overlap_reward_model",
}
"""Metrics that are logged under a second name too, which dashboards of MindSpeed-RL have for them."""

REWARDS = ("grpo/rewards/mean", "critic/rewards/mean")
"""The metric of the mean reward: each algorithm has its own."""

MEMORY_PHASES: dict[str, Phase] = {
    Phase.START: Phase.START,
    Verb.TO_ROLLOUT: Phase.TO_ROLLOUT,
    Verb.GENERATE: Phase.ROLLOUT,
    Verb.TO_TRAINING: Phase.TO_TRAINING,
    Verb.SCORE: Phase.POLICY_LOGPROBS,
    f"{Verb.SCORE} critic": Phase.CRITIC_VALUES,
    Verb.LEARN: Phase.UPDATE,
    f"{Verb.LEARN} critic": Phase.CRITIC_UPDATE,
    Verb.JUDGE: Phase.REWARD_MODEL,
}
"""The phase under which the memory of a verb, and a model of its own, is reported: memory/<phase>/peak_bytes."""

RESTING = "resting"
"""What a rank holds between its start and its first verb, reported once as memory/start/resident_bytes."""
