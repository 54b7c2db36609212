"""Everything that can be set. Batch sizes are in prompts, samples and tokens of the whole run, never per device."""

from dataclasses import dataclass, field
from typing import Any, Literal

from spmd_rl.platforms import names as platform_names

PlatformName = Literal["auto", *platform_names()]


@dataclass(frozen=True)
class ModelConfig:
    path: str
    """Hugging Face directory of the policy: config.json, *.safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights in training and in rollout. Optimizer states and log-probabilities are always float32."""
    reference_path: str | None = None
    """Directory of the frozen reference model. None: the policy as it was at the start."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's tokenizer."""


@dataclass(frozen=True)
class ArithmeticConfig:
    operations: tuple[Literal["+", "-", "*"], ...] = ("+",)
    """Which operations the problems use, drawn evenly."""
    min_operand: int = 0
    """Smallest operand."""
    max_operand: int = 9
    """Largest operand: 9 for one digit, 99 for up to two."""
    problems: int = 2000
    """Problems to train on. Distinct while the operands allow it, then repeated (the log says so)."""
    wording: str = "What is {a} {op} {b}? Answer with the number only."
    """The prompt, with places {a}, {op} and {b}."""


@dataclass(frozen=True)
class DatasetConfig:
    """One source and how its columns are read: what a file in configs/datasets/ holds."""

    source: str
    """A .jsonl, .json, .csv, .parquet or .arrow file, a directory of them or of `datasets.save_to_disk`, a name on the
    Hugging Face hub (openai/gsm8k), "arithmetic", or "reasoning_gym:<task>"."""
    name: str | None = None
    """What metrics call it. None: the name of the file that describes it, else of its source."""
    subset: str | None = None
    """Configuration of a dataset on the hub."""
    split: str | None = None
    """Split to train on: of the hub, of `save_to_disk`, or the files of a directory that have it in their name."""
    eval_split: str | None = None
    """Split to evaluate on. None: the same."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages {role, content}. "a.b" is column b inside a."""
    query_column: str | None = None
    """Column with more of the prompt, put on a line after it where it is not empty (Alpaca's `input`)."""
    answer_column: str = "answer"
    """Column of the answer that reward rules compare with. "": the rows have none, as where a reward model judges."""
    system_column: str | None = None
    """Column of a row's own system message, which goes before `system` where it is not empty."""
    extra_columns: tuple[str, ...] | None = None
    """Further columns to keep for reward rules. None: all but binary ones (images), which are never kept."""
    answer_pattern: str | None = None
    """Regular expression whose group 1, where it matches last, is the answer. None: the column as it is."""
    answer_without: str = ""
    """Characters taken out of the answer, such as the comma in 1,450."""
    deduplicate: str | None = None
    """Column that tells rows apart: of those with the same value the first is kept."""
    system: str | None = None
    """System message, unless the run sets data.system."""
    template: str | None = None
    """Template, unless the run sets data.template."""
    problems: int = 2000
    """How many problems a reasoning_gym task makes for training."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a reasoning_gym task, under its own names."""


@dataclass(frozen=True)
class DataConfig:
    source: str = "arithmetic"
    """What to train on: "arithmetic" or "reasoning_gym:<task>" (problems made on the spot), a .jsonl, .json, .csv,
    .parquet or .arrow file, a directory of them, a Hugging Face hub name, a file of configs/datasets/, or
    FILE.yaml:PATH for the columns of the one and the rows of the other."""
    mix: dict[str, float] = field(default_factory=dict)
    """Several sources with weights, in place of data.source: --data.mix a.jsonl 3 configs/datasets/b.yaml 1"""
    prompt_column: str | None = None
    """Column of the prompt: a string, or a list of chat messages {role, content}; "a.b" is column b inside a. None:
    what the dataset's file says, else "prompt"."""
    answer_column: str | None = None
    """Column of the answer that reward rules compare with; "": there is none. None: what the dataset's file says, else
    "answer"."""
    answer_pattern: str | None = None
    """Regular expression whose group 1, where it matches last, is the answer. None: what the dataset's file says."""
    system: str | None = None
    """System message put before every prompt. None: what the dataset's file says, else what the template does by
    itself. Not with template "plain"."""
    template: str | None = None
    """How a prompt is spelled: "chat" (the tokenizer's own chat template), "plain" (its text as it is), a name in
    configs/templates/, or a .jinja file. None: what the dataset's file says, else "chat"."""
    enable_thinking: bool | None = None
    """Passed to a template that knows it (Qwen3). None: what the template does by itself."""
    max_prompt_length: int = 1024
    """Tokens, template included."""
    overlong_prompts: Literal["drop", "refuse"] = "drop"
    """What to do with longer prompts: leave them out and say how many, or stop and name them."""
    empty_answers: Literal["drop", "refuse"] = "refuse"
    """What to do with rows whose answer is empty."""
    bad_rows: Literal["drop", "refuse"] = "refuse"
    """What to do with rows that cannot be read (broken text, a missing column, a value of another type): leave them out
    and say how many, or stop at the first and name file, row and column."""
    eval_source: str | None = None
    """The held-out problems, named as data.source is. None: none, except that problems made on the spot have their own,
    disjoint from training."""
    eval_problems: int = 128
    """At most so many held-out problems, the first of the source."""
    shuffle: bool = True
    """Another order every epoch, drawn from run.seed. False: the order of the source."""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = 1
    """Ranks that share every layer in training; divides the model's heads. Prefer ranks of one machine."""
    pipeline: int = 1
    """Stages of layers in training; divides the model's layers, or see layers_per_stage."""
    virtual: int = 1
    """Parts of each pipeline stage, which are not neighbours: stages wait less for each other (Megatron's virtual
    pipeline)."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage, in the model's order, where they don't divide evenly; pipeline x virtual numbers."""
    expert: int = 1
    """Ranks that share the experts of a layer in training; divides the experts, and the ranks of a stage."""
    expert_tensor: int = 1
    """Ranks that share each single expert in training; 1 is fastest where the experts fit."""
    context: int = 1
    """Ranks that share the tokens of every micro-batch in training, for long sequences; divides the model's heads."""
    sequence: bool = True
    """With tensor > 1, norms and residuals are split along the sequence too: less memory, same traffic."""

    def data(self, world_size: int) -> int:
        """Data-parallel size: what tensor, context and pipeline leave of the ranks."""
        return world_size // (self.tensor * self.context * self.pipeline)


@dataclass(frozen=True)
class RolloutConfig:
    tensor: int = 1
    """Ranks that share one inference engine. There are world size / tensor engines, each with its own prompts."""
    data: int = 1
    """Engines that share the experts of a mixture-of-experts model; they run in step. 1: each has all of them."""
    expert_parallel: bool = False
    """Each rank of tensor x data holds some experts whole; otherwise a part of every expert."""
    temperature: float = 1.0
    """Above 0. Training uses the log-probabilities of the distribution at this temperature. Evaluation is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability together. 1: from all."""
    top_k: int = 0
    """Sample from so many likeliest tokens. 0: from all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this fraction of the likeliest one's probability. 0: none."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's own end tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own."""
    max_response_length: int = 512
    """Tokens; a longer response is cut and its finish reason is "length"."""
    max_sequences: int = 64
    """Sequences one engine runs at once."""
    cache_gib: float = 1.0
    """Memory of the key-value cache, GiB per rank."""
    block_tokens: int = 32
    """Tokens in one block of the cache; a shared prefix is reused in whole blocks. (Latent attention on a CPU: 16.)"""
    refresh_bucket_mib: float | None = None
    """Weights travel in buckets of this size; a rank holds at most two that it sends and two that it receives. None:
    what suits the machine (16 on CPUs, 256 on accelerators)."""
    canary_steps: int = 10
    """Every so many steps, from the first on, vLLM and Megatron both score a sequence of a few tokens. 0: never."""
    canary_tolerance: float | None = None
    """The run stops when their log-probabilities differ by more on average. None: 0.001 in float32, 0.1 in bfloat16."""


@dataclass(frozen=True)
class AlgorithmConfig:
    samples_per_prompt: int = 8
    """Responses to each prompt: the group that rewards are compared within."""
    advantage: str = "grpo"
    """grpo: reward minus the group's mean (https://arxiv.org/abs/2402.03300). Or file.py:function of your own, or
    package.module:function, with options: it is given the groups and the rewards of a step's samples."""
    normalize_std: bool = True
    """Divide the advantage by the group's standard deviation. False: Dr. GRPO (https://arxiv.org/abs/2503.20783)."""
    std_epsilon: float = 1e-6
    """Added to that standard deviation."""
    clip_low: float = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    """See clip_low; larger than it: DAPO's clip-higher (https://arxiv.org/abs/2503.14476)."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference in the loss. 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How that divergence is estimated from samples (http://joschu.net/blog/kl-approx.html)."""
    entropy_coefficient: float = 0.0
    """Weight of an entropy bonus in the loss."""
    loss: str = "grpo"
    """grpo: PPO's clipped surrogate at each token, with the divergence and the entropy. Or a function of your own."""
    loss_reduction: str = "token_mean"
    """token_mean: every response token of the mini-batch weighs the same. sequence_mean: every response does. Or a
    function of your own, which is given how many tokens of each sample of the mini-batch are trained on."""
    curation: str = "all"
    """Which samples of a step to train on. all: every one. teaching: those of groups whose rewards are not all equal.
    Or a function of your own, which is given the groups and the rewards."""
    drop_uniform_groups: bool = False
    """True: the curation `teaching`."""


@dataclass(frozen=True)
class RewardModelConfig:
    path: str = ""
    """Hugging Face directory of a ...ForSequenceClassification model: config.json, *.safetensors, tokenizer."""
    weight: float = 1.0
    """Of its normalised score in the reward, beside the rules. 0: the score is measured and earns nothing."""
    label: int | None = None
    """Which of the model's outputs is the score, counted from 0; needed where it has several."""
    reads: Literal["auto", "tokens", "conversation"] = "auto"
    """tokens: the policy's own token ids. conversation: messages and response in its own chat template and tokenizer.
    auto: tokens where tokenizer and template are the policy's, else conversation."""
    normalize: Literal["none", "group", "batch", "running"] = "none"
    """Subtract the mean of the scores and divide by their standard deviation: within the samples of a prompt, within
    a step, or over the run so far."""
    clip: tuple[float, ...] = ()
    """Lowest and highest normalised score; what is beyond counts as these. Empty: not clipped."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of its weights; the score itself is computed in float32. None: model.dtype."""
    tokens_per_microbatch: int | None = None
    """Tokens in one of its passes. None: train.tokens_per_microbatch. Scores do not depend on it."""


@dataclass(frozen=True)
class RewardConfig:
    rules: dict[str, float] = field(default_factory=lambda: {"math_answer": 1.0})
    """Rule -> weight; a sample's reward is the weighted sum. A rule is a name that comes with spmd_rl, or
    file.py:function, or package.module:function, with options: --reward.rules acc 1 "overlong(buffer_tokens=512)" 1"""
    timeout_seconds: float = 10.0
    """A rule that takes longer for one sample is stopped; the sample's cause is then "timeout"."""
    workers: int = 1
    """Grading processes per rank, for rules that take one sample; every other rule has one of its own."""
    batch: int = 64
    """Samples that a rule for lists of samples is given at most, or that an asynchronous one works on at once."""
    memory_mib: int = 2048
    """Memory of a grading process; a rule that needs more scores 0 with cause "crash". 0: no limit."""
    models: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Name -> a reward model that scores the samples too, on the ranks that train. NAME is any word of yours:
    --reward.models.helpful.path DIR"""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 100
    """Rounds of rollout and update."""
    prompts_per_step: int = 32
    """Prompts in one round, over all ranks."""
    minibatches: int = 1
    """Optimizer steps per round; divides prompts_per_step. 1: strictly on-policy."""
    learning_rate: float = 1e-6
    """At its highest, after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the end of the warm-up to the last step."""
    warmup_steps: int = 0
    """Rounds in which the learning rate rises from 0."""
    min_learning_rate: float = 0.0
    """Where the schedule ends."""
    weight_decay: float = 0.0
    """Decoupled from the gradient (AdamW)."""
    adam_beta1: float = 0.9
    """How much of the gradient's running mean a step keeps."""
    adam_beta2: float = 0.95
    """How much of the squared gradient's running mean a step keeps."""
    adam_epsilon: float = 1e-8
    """Added to the root of that."""
    clip_grad: float = 1.0
    """Largest norm of the gradient over all ranks. 0: not clipped."""
    tokens_per_microbatch: int = 4096
    """Tokens in one forward and backward pass of a data-parallel rank: what training memory depends on; the ranks of
    parallel.context share them. Gradients do not depend on it."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at the same time. Memory only; results do not depend on it."""
    share_prompts: bool = True
    """Compute a group's common prompt once instead of once a sample, where the attention can (CPU)."""
    max_skipped: int = 3
    """An update whose gradient is not finite is skipped: weights and optimizer stay as they were. When so many in a row
    were, the run stops. 1: at the first."""
    recompute: bool = False
    """Compute activations again in the backward pass instead of keeping them: slower, less memory."""


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int = 0
    """Evaluate on the held-out problems after every so many steps. 0: only before and after."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    benchmarks: tuple[str, ...] = ()
    """Further held-out problems, each a set of its own, named as data.source is: configs/datasets/gsm8k.yaml."""
    limit: int | None = None
    """At most so many problems of each benchmark, the first ones. None: all. (data.eval_problems is for
    data.eval_source.)"""
    samples: int = 1
    """Responses to each held-out problem; more than 1 needs a temperature, and gives pass@k and majority@k."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    """As rollout.top_p, in evaluation."""
    top_k: int = 0
    """As rollout.top_k, in evaluation."""
    max_response_length: int | None = None
    """Tokens of a response in evaluation. None: rollout.max_response_length."""


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 0
    """Save all that a continuation needs after every so many steps. 0: only on a signal (SIGUSR1)."""
    keep_last: int = 2
    """So many of the newest checkpoints stay."""
    keep_every: int = 0
    """Those of steps that this divides stay too. 0: none."""
    keep_best: str | None = None
    """The one with the largest value of this metric stays too, such as eval/gsm8k/accuracy; with a minus before the
    name, the smallest."""
    resume: str = "auto"
    """auto: go on from the newest whole checkpoint of this run, if there is one. never: start anew; what was there is
    moved aside. Or the directory of a checkpoint."""
    resume_allow: tuple[str, ...] = ()
    """Settings that may differ from the checkpoint's run beside those that always may, such as
    train.learning_rate."""
    load: Literal["all", "weights"] = "all"
    """weights: take only the model's weights from the checkpoint; optimizer, schedule and data begin anew."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do when a save fails, as on a full disk: say so and go on with the older checkpoint, or stop."""


@dataclass(frozen=True)
class HangConfig:
    action: Literal["abort", "report", "off"] = "abort"
    """What to do when the run has been still for too long: report who waits for whom and end all ranks, only report,
    or don't watch."""
    deadline_seconds: dict[str, float] = field(default_factory=dict)
    """Phase (as in timing/<phase>) or verb -> for how long no rank may get on in it: --hang.deadline_seconds rollout
    900 update 300. The others learn theirs."""
    minimum_seconds: float = 600.0
    """A learned deadline is never shorter."""
    factor: float = 10.0
    """A learned deadline: so many times the longest stillness of the phase so far."""
    first_seconds: float = 1800.0
    """Deadline of a phase that was never seen to end: kernels may be compiled in it."""
    silent_seconds: float = 300.0
    """A rank that gives no sign of life for so long is lost: stopped, or its node or link is gone."""


@dataclass(frozen=True)
class RunConfig:
    name: str = "grpo"
    """Names the run's directory and its W&B run."""
    dir: str | None = None
    """Where everything of the run is written. None: runs/<name>."""
    seed: int = 1
    """The same seed gives the same problems, order and samples, whatever the number of ranks."""
    platform: PlatformName = "auto"
    """What to run on. auto: the accelerator that is there, else the CPU."""
    control_timeout_seconds: float = 600.0
    """How long rank 0 waits for the others to begin or end a verb before it names who is missing."""
    collective_timeout_seconds: float = 1800.0
    """How long one exchange of tensors may take."""
    samples_logged: int = 8
    """Conversations written to samples/ each step. -1: all of them, by each rank into a file of its own."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: not at all, into files to upload later, or live."""
    wandb_project: str = "spmd_rl"
    """Project of the W&B run."""
    export_hf: bool = True
    """At the end, write the trained model as a Hugging Face directory into hf/."""


@dataclass(frozen=True)
class Config:
    """One run. Sections in the order in which a run meets them."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hang: HangConfig = field(default_factory=HangConfig)
    run: RunConfig = field(default_factory=RunConfig)
    inject: tuple[str, ...] = ()
    """Faults to suffer, to see what the run makes of them: kill:rank=1,phase=rollout,step=3 (docs/faults.md). Each
    strikes once."""

    @property
    def longest_response(self) -> int:
        """Tokens of a response in training or in evaluation, at most."""
        return max(self.rollout.max_response_length, self.evaluation.max_response_length or 0)
