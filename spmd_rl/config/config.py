"""Hold all that can be set. Batch sizes are in prompts, samples and tokens of the whole run, never per device."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from spmd_rl.config.checkpoint_config import CheckpointConfig
from spmd_rl.config.critic_config import CriticConfig
from spmd_rl.config.data_config import DataConfig
from spmd_rl.config.fields import (
    Bounds,
    FiniteFloat,
    Fraction,
    FromZeroToOne,
    MayDiffer,
    MustStay,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Schedule,
)
from spmd_rl.config.profile_config import ProfileConfig
from spmd_rl.config.reward_config import RewardConfig
from spmd_rl.config.rollout_config import RolloutConfig, TopP
from spmd_rl.platforms import names as platform_names

_SIGN = "a heartbeat comes once a second, and later on a machine that is full"

if TYPE_CHECKING:
    PlatformName = str
else:
    PlatformName = Literal["auto", *platform_names()]
GAE = "gae"
"""The advantage of PPO; see AlgorithmConfig.advantage."""


@dataclass(frozen=True)
class ModelConfig:
    knob = "model.path"
    """The setting that names the directory, as the program at hand calls it."""

    path: str
    """Hugging Face directory of the policy: config.json, *.safetensors, tokenizer. Or its name on the hub (owner/name,
    owner/name@revision), which is downloaded once a machine."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights in training and in rollout. Optimizer states and log-probabilities are always float32."""
    reference_path: str | None = None
    """Directory or hub name of the frozen reference model. None: the policy as it was at the start."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's tokenizer."""
    freeze: tuple[Literal["vision", "projector", "none"], ...] = ("vision", "projector")
    """Parts of a model that sees which stay as they are: its vision tower (vision), and what turns the tower's features
    into tokens (projector). none: all of it is trained."""


@dataclass(frozen=True)
class ParallelConfig:
    tensor: PositiveInt = 1
    """Tensor-parallel size (TP) of training; divides the model's heads. Prefer ranks of one machine."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size (PP) of training, the stages of layers; divides the model's layers, or see
    layers_per_stage."""
    virtual: PositiveInt = 1
    """Parts of each pipeline stage (VPP), which are not neighbours: stages wait less for each other (Megatron's virtual
    pipeline)."""
    layers_per_stage: tuple[PositiveInt, ...] = ()
    """Layers of each stage, in the model's order, where they don't divide evenly; pipeline x virtual numbers."""
    expert: PositiveInt = 1
    """Expert-parallel size (EP) of training: ranks that share the experts of a layer; divides the experts, and the
    ranks of a stage."""
    expert_tensor: PositiveInt = 1
    """Tensor-parallel size of the experts (ETP) in training: ranks that share each single expert; 1 is fastest where
    the experts fit."""
    context: PositiveInt = 1
    """Context-parallel size (CP) of training: ranks that share the tokens of every micro-batch, for long sequences;
    divides the model's heads."""
    sequence: bool = True
    """Sequence parallelism (SP): with tensor > 1, norms and residuals are split along the sequence too: less memory,
    same traffic."""

    def data(self, world_size: int) -> int:
        """Return the data-parallel size (DP): what tensor, context and pipeline leave of the ranks."""
        return world_size // (self.tensor * self.context * self.pipeline)


@dataclass(frozen=True)
class AlgorithmConfig:
    samples_per_prompt: PositiveInt = 8
    """Responses to each prompt: the group that rewards are compared within."""
    advantage: str = "grpo"
    """grpo: reward minus the group's mean (https://arxiv.org/abs/2402.03300). dr_grpo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax: docs/algorithms.md. gae: of each token, from a critic's values, which is PPO:
    start spmd_rl.ppo. Or file.py:function of your own, or package.module:function, with options: it is given the
    groups and the rewards of a step's samples."""
    gamma: FromZeroToOne = 1.0
    """gae (https://arxiv.org/abs/1506.02438): what a reward is worth a token earlier."""
    lam: FromZeroToOne = 0.95
    """gae: 1 trusts the rewards, 0 the critic's value of the next token."""
    advantage_clip: PositiveFloat | None = None
    """Advantages are kept in [-advantage_clip, advantage_clip]. None: as they are."""
    normalize_std: bool = True
    """Divide the advantage by the group's standard deviation. False: Dr. GRPO (https://arxiv.org/abs/2503.20783)."""
    std_epsilon: NonNegativeFloat = 1e-6
    """Added to that standard deviation."""
    clip_low: Annotated[float, Bounds(gt=0, le=1)] = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: PositiveFloat = 0.2
    """See clip_low; larger than it: DAPO's clip-higher (https://arxiv.org/abs/2503.14476)."""
    clip_dual: Annotated[float, Bounds(gt=1)] = 3.0
    """With the loss dual_clip: on a token with a negative advantage the ratio counts at most so much
    (https://arxiv.org/abs/1912.09729)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """KL coefficient (beta): weight of the KL divergence from the reference in the loss, or in the reward. 0: no
    reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"] = "k3"
    """Estimator of that divergence from samples (http://joschu.net/blog/kl-approx.html); kl, mse and low_var_kl are
    other names of k1, k2 and k3."""
    kl_in_reward: bool = False
    """Subtract the divergence from the reward, in place of adding it to the loss: with gae at each token, else its sum
    over a response."""
    kl_control: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: with kl_in_reward, kl_coefficient is where the weight begins, and it is led to kl_target
    (https://arxiv.org/abs/1909.08593)."""
    kl_target: PositiveFloat = 100.0
    """Mean divergence a token that an adaptive weight aims at; usual are 0.01 to 0.1."""
    kl_horizon: PositiveFloat = 1000.0
    """Samples over which an adaptive weight moves: a step of n samples changes it by 0.2 n / kl_horizon of itself, at
    most."""
    entropy_coefficient: FiniteFloat = 0.0
    """Weight of an entropy bonus in the loss."""
    value_loss: str = "clipped"
    """gae: the critic's. clipped: half the squared distance to the return. Or a function of your own."""
    value_clip: NonNegativeFloat = 0.5
    """gae: in that loss, how far a value may move from what it was before the update. 0: not clipped."""
    loss: str = "grpo"
    """grpo: PPO's clipped surrogate at each token, with the divergence and the entropy. dual_clip, cispo: other bounds
    of the ratio; gspo, rloo: one ratio a response (docs/algorithms.md). Or a function of your own."""
    loss_reduction: str = "token_mean"
    """token_mean: every response token of the mini-batch weighs the same. sequence_mean: every response does.
    sequence_sum: sums of responses, averaged. fixed_length: these, divided by rollout.max_response_length. Or a
    function of your own, which is given how many tokens of each sample of the mini-batch are trained on."""
    correction: str = "token_truncate"
    """Weight of a token for the gap between vLLM's probabilities, which wrote it, and the trainer's: token_truncate,
    sequence_truncate(bound=2.0); token_mask(low=0.5, high=5.0), sequence_mask, geometric_mask (docs/algorithms.md).
    off: 1. Where the two agree, all are 1. Or a function of your own."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Log-probabilities that the ratio of a loss is against. trainer: of the policy before the update; where epochs or
    mini-batches follow the first, that is a pass over the samples. rollout: vLLM's, which come with them: no such pass,
    and what algorithm.correction would weigh is part of the ratio."""
    curation: str = "all"
    """Which samples of a step to train on. all: every one. teaching: those of groups whose rewards are not all equal.
    Or a function of your own, which is given the groups and the rewards."""
    drop_uniform_groups: bool = False
    """True: the curation `teaching`."""
    refill_attempts: NonNegativeInt = 0
    """Sample further prompts, so many times in a step at most, until train.prompts_per_step groups are kept by the
    curation: DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476). 0: train on fewer."""
    refill_oversample: Annotated[float, Bounds(ge=1)] = 1.0
    """Further prompts for each group that is missing: with more than 1 fewer attempts are needed, and groups that teach
    may be left over."""
    refill_leftover: Literal["drop", "keep"] = "drop"
    """The fate of groups beyond train.prompts_per_step. keep: their prompts are the first ones of the next step,
    answered anew by the policy of then."""

    @property
    def uses_critic(self) -> bool:
        """Return True for PPO, which learns from a critic's values."""
        return self.advantage == GAE

    @property
    def uses_reference(self) -> bool:
        """Return True where a divergence from the reference is computed."""
        return self.kl_coefficient > 0.0


@dataclass(frozen=True)
class TrainConfig:
    steps: PositiveInt = 100
    """Rounds of rollout and update."""
    prompts_per_step: PositiveInt = 32
    """Batch size in prompts of one step, over all ranks; times samples_per_prompt it is the batch size in samples."""
    minibatches: PositiveInt = 1
    """Mini-batches: optimizer steps per step and epoch; divides prompts_per_step. 1, and one epoch: strictly
    on-policy."""
    epochs: PositiveInt = 1
    """Passes over a round's samples."""
    shuffle_mini_batch: bool = False
    """Take the mini-batches of each epoch in an order of its own, drawn from run.seed."""
    learning_rate: NonNegativeFloat = 1e-6
    """At its highest, after the warm-up."""
    schedule: Schedule = "constant"
    """From the end of the warm-up to the last step. inverse_sqrt: falls as one over the root of the step, whatever the
    number of steps. wsd: stays up, and falls in the last decay_fraction of the run (https://arxiv.org/abs/2404.06395).
    """
    warmup_steps: NonNegativeInt = 0
    """Rounds in which the learning rate rises from 0."""
    warmup_fraction: FromZeroToOne = 0.0
    """In place of warmup_steps: the part of the run's steps in which it rises, rounded to whole steps."""
    decay_fraction: FromZeroToOne = 0.1
    """With the schedule wsd: the part of the run's steps in which the learning rate falls, in a straight line."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of the schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled from the gradient (AdamW)."""
    adam_beta1: Fraction = 0.9
    """Part of the gradient's running mean that a step keeps."""
    adam_beta2: Fraction = 0.95
    """Part of the squared gradient's running mean that a step keeps."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the root of that."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest norm of the gradient over all ranks. 0: not clipped."""
    moe_aux_loss_coefficient: NonNegativeFloat = 0.0
    """Weight of Megatron's load-balancing loss of the policy's experts (https://arxiv.org/abs/2101.03961): over the
    tokens of each micro-batch, so that this one term depends on how samples are put together. 0: none."""
    tokens_per_microbatch: MayDiffer[PositiveInt | None] = None
    """Tokens in one forward and backward pass of a data-parallel rank: what training memory depends on; the ranks of
    parallel.context share them. Gradients do not depend on it. None: 4096 on CPUs, 16384 on accelerators, or the
    longest sample where that is more."""
    patches_per_microbatch: MayDiffer[PositiveInt | None] = None
    """Patches of images in one such pass; a prompt that shows more has passes of its own. None: as many as come with
    the tokens. Gradients do not depend on it."""
    tokens_per_forward_microbatch: MayDiffer[PositiveInt | None] = None
    """The same of passes without gradients, which need less memory: several micro-batches become one, as many as fit
    into this. None: as train.tokens_per_microbatch."""
    sequences_per_microbatch: MayDiffer[PositiveInt | None] = None
    """Samples in one pass with gradients, at most, however short they are. None: as many as the tokens allow."""
    logprob_chunk_tokens: MayDiffer[PositiveInt] = 1024
    """Tokens whose logits exist at the same time. Memory only; results do not depend on it."""
    share_prompts: MayDiffer[bool] = True
    """Compute a group's common prompt once instead of once a sample, where the attention can (CPU)."""
    max_skipped: MayDiffer[PositiveInt] = 3
    """An update whose gradient is not finite, or beyond a bound, is skipped: weights and optimizer stay as they were,
    and the samples it was most about are written to skipped/. When so many in a row were, the run stops. 1: at the
    first."""
    skipped_rate_factor: MayDiffer[Annotated[float, Bounds(gt=0, le=1)]] = 1.0
    """A skipped update multiplies the learning rate of its model by this, for the rest of the run; a second one does
    again. 1: it stays."""
    grad_norm_bound: PositiveFloat | None = None
    """An update of the policy is skipped when the gradient's norm, before it is clipped, is larger. None: no bound."""
    kl_bound: PositiveFloat | None = None
    """An update of the policy is skipped when it is further from the one that wrote the samples: log-probabilities of
    their tokens differ by more on average. None: no bound."""
    recompute: MayDiffer[Literal["none", "selective", "full", "True", "False"]] = "none"
    """Compute activations again in the backward pass instead of keeping them: slower, less memory. selective: those
    of train.recompute_modules; full, or True: of whole layers; none, or False: keep them."""
    recompute_modules: MayDiffer[tuple[Literal["core_attn", "mlp", "moe"], ...]] = ("core_attn",)
    """With selective, by Megatron's names: the inside of attention, a layer's feed-forward block, its experts."""
    recompute_layers: MayDiffer[PositiveInt | None] = None
    """With full: so many layers of each pipeline stage are computed again, the first ones; the others keep their
    activations. None: all."""

    @property
    def microbatch_tokens(self) -> int:
        """Return tokens_per_microbatch of a run, which has one (config/machine_sizes.py)."""
        assert self.tokens_per_microbatch is not None
        return self.tokens_per_microbatch

    @property
    def recomputes(self) -> str:
        """Return none, selective or full."""
        return {"True": "full", "False": "none"}.get(self.recompute, self.recompute)


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: NonNegativeInt = 0
    """Evaluate on the held-out problems after every so many steps. 0: only before and after."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    benchmarks: tuple[str, ...] = ()
    """Further held-out problems, each a set of its own, named as data.source is: configs/datasets/gsm8k.yaml."""
    limit: PositiveInt | None = None
    """At most so many problems of each benchmark, the first ones. None: all. (data.eval_problems is for
    data.eval_source.)"""
    samples: PositiveInt = 1
    """Responses to each held-out problem; more than 1 needs a temperature, and gives pass@k and majority@k."""
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""
    top_p: TopP = 1.0
    """As rollout.top_p, in evaluation."""
    top_k: NonNegativeInt = 0
    """As rollout.top_k, in evaluation."""
    max_response_length: PositiveInt | None = None
    """Tokens of a response in evaluation. None: rollout.max_response_length."""


@dataclass(frozen=True)
class HangConfig:
    action: Literal["abort", "report", "off"] = "abort"
    """When the run has made no progress for too long: report who waits for whom and end all ranks, only report,
    or don't watch."""
    deadline_seconds: dict[str, PositiveFloat] = field(default_factory=dict)
    """Phase (as in timing/<phase>) or verb -> for how long no rank may get on in it: --hang.deadline_seconds rollout
    900 update 300. The others learn theirs."""
    minimum_seconds: PositiveFloat = 600.0
    """A learned deadline is never shorter."""
    factor: PositiveFloat = 10.0
    """A learned deadline: so many times the longest time without progress of the phase so far."""
    first_seconds: PositiveFloat = 1800.0
    """Deadline of a phase that was never seen to end: kernels may be compiled in it."""
    silent_seconds: Annotated[float, Bounds(ge=3, note=_SIGN)] = 300.0
    """A rank that sends no heartbeat for so long is lost: stopped, or its node or link is gone."""


@dataclass(frozen=True)
class RunConfig:
    name: str = ""
    """Names the run's directory and its W&B run. Empty: as the configuration file is called, without .yaml; without a
    file grpo or ppo. The same command finds the same run again."""
    dir: str | None = None
    """Directory for everything of the run. None: runs/<name>, below the directory that the command is started in."""
    seed: MustStay[NonNegativeInt] = 1
    """The same seed gives the same problems, order and samples, whatever the number of ranks."""
    platform: PlatformName = "auto"
    """Kind of machine. auto: the accelerator that is there, else the CPU."""
    deterministic: bool = False
    """Have accelerators give the same bits each time, slower; kernels that can't are named in a warning. CPUs do
    anyway."""
    control_timeout_seconds: PositiveFloat = 600.0
    """Limit of rank 0's wait for the others to begin or end a verb, after which it names who is missing."""
    collective_timeout_seconds: PositiveFloat = 1800.0
    """Limit of one exchange of tensors."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    samples_logged: Annotated[int, Bounds(ge=-1, note="-1: all")] = 8
    """Conversations written to samples/ each step. -1: all of them, by each rank into a file of its own."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: not at all, into files to upload later, or live."""
    wandb_project: str = "spmd_rl"
    """Project of the W&B run."""
    wandb_entity: str | None = None
    """User or team of the W&B run. null: the key's own."""
    wandb_group: str | None = None
    """Group of the W&B or SwanLab run, such as the seeds of one experiment."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the W&B or SwanLab run."""
    swanlab: Literal["off", "offline", "online"] = "off"
    """SwanLab: not at all, into files to upload later, or live; the package swanlab is installed by hand."""
    swanlab_project: str = "spmd_rl"
    """Project of the SwanLab run."""
    swanlab_workspace: str | None = None
    """Workspace of the SwanLab run. null: the key's own."""
    export_hf: bool = True
    """At the end, write the trained model as a Hugging Face directory into hf/, and a critic into hf_critic/."""


@dataclass(frozen=True)
class Config:
    """One run. Sections in the order in which a run meets them."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    parallel: MayDiffer[ParallelConfig] = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    evaluation: MayDiffer[EvaluationConfig] = field(default_factory=EvaluationConfig)
    checkpoint: MayDiffer[CheckpointConfig] = field(default_factory=CheckpointConfig)
    hang: MayDiffer[HangConfig] = field(default_factory=HangConfig)
    run: MayDiffer[RunConfig] = field(default_factory=RunConfig)
    inject: MayDiffer[tuple[str, ...]] = ()
    """Fault injection, to see what the run makes of it: kill:rank=1,phase=rollout,step=3 (docs/faults.md). Each
    strikes once."""

    @property
    def program(self) -> str:
        """Return the module that torchrun starts for this run."""
        return "spmd_rl.ppo" if self.algorithm.uses_critic else "spmd_rl.grpo"

    @property
    def critic_epochs(self) -> int:
        """Return the passes of the critic over a step's mini-batches."""
        return self.critic.epochs or self.train.epochs

    @property
    def longest_sample(self) -> int:
        """Tokens of a prompt with its response in training, at most."""
        return self.data.max_prompt_length + self.rollout.max_response_length

    @property
    def longest_response(self) -> int:
        """Tokens of a response in training or in evaluation, at most."""
        return max(self.rollout.max_response_length, self.evaluation.max_response_length or 0)
