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
    CHECKPOINT_DIGESTS = "checkpoint_digests"
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
    UPDATE = "update"
    CHECKPOINT = "checkpoint"
    EXPORT = "export"


MEMORY_PHASES: dict[str, Phase] = {
    Phase.START: Phase.START,
    Verb.TO_ROLLOUT: Phase.TO_ROLLOUT,
    Verb.GENERATE: Phase.ROLLOUT,
    Verb.TO_TRAINING: Phase.TO_TRAINING,
    Verb.SCORE: Phase.POLICY_LOGPROBS,
    Verb.LEARN: Phase.UPDATE,
    Verb.JUDGE: Phase.REWARD_MODEL,
}
"""The phase under which the memory of a verb is reported: memory/<phase>/peak_bytes."""
