"""The settings of verl: data, actor_rollout_ref, critic, algorithm, trainer."""

from spmd_rl.config.foreign.foreign_row import (
    Facts,
    Program,
    Value,
    fixed,
    named,
    on,
    parts_of,
    positive,
    rows,
    samples_to_tokens,
    unless,
    without,
)
from spmd_rl.config.foreign.mindspeed_names import ESTIMATORS, SCHEDULES

_BATCH = "prompts of an optimizer step there; here the number of optimizer steps: prompts_per_step / mini-batch size"
_MICRO = "samples there; here tokens, of every pass: samples x (longest prompt + longest response)"
_FILES = "a file in the columns that configs/datasets/verl_parquet.yaml names"
_EPOCHS = "here steps: epochs x rows / train.prompts_per_step"
_RULE = "verl:path/to/file.py:function takes a function of its signature as it is"
_LOSSES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "fixed_length",
}
_ADVANTAGES = ("gae", "grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def _kl(value: Value, facts: Facts) -> Value:
    """Return the weight of the one divergence that is on: none, where a file says nothing; asked alone, it is on."""
    return value if not facts or facts.get("use_kl_loss") or facts.get("use_kl_in_reward") else 0.0


def _reward_kl(value: Value, facts: Facts) -> Value:
    return value if facts.get("use_kl_in_reward") else None


def _source(value: Value, facts: Facts) -> Value:
    return f"configs/datasets/verl_parquet.yaml:{value[0] if isinstance(value, list) else value}"


def _rule(value: Value, facts: Facts) -> Value:
    return {"reward.rules": {f"verl:{value}:{facts.get('custom_reward_function.name') or 'compute_score'}": 1.0}}


def _loggers(value: Value, facts: Facts) -> Value:
    online = {f"run.{name}": "online" if name in value else "off" for name in ("wandb", "swanlab")}
    return {"run.tensorboard": "tensorboard" in value} | online


def _optimizer(section: str, ours: str, warmup: str) -> tuple[tuple[Value, ...], ...]:
    return (
        (f"{section}.optim.lr", f"{ours}.learning_rate"),
        (f"{section}.optim.weight_decay", f"{ours}.weight_decay"),
        (
            f"{section}.optim.lr_warmup_steps",
            f"{ours}.{warmup}_steps",
            "",
            lambda value, _: value if value >= 0 else None,
        ),
        (
            f"{section}.optim.lr_warmup_steps_ratio",
            f"{ours}.{warmup}_fraction",
            "",
            unless(f"{section}.optim.lr_warmup_steps"),
        ),
        (f"{section}.optim.warmup_style {section}.optim.lr_scheduler_type", f"{ours}.schedule", "", named(SCHEDULES)),
    )


_SET = rows(
    ("train_batch_size rollout_batch_size", "train.prompts_per_step"),
    ("ppo_mini_batch_size", "train.minibatches", _BATCH, parts_of("train_batch_size")),
    ("worker.actor.global_batch_size", "train.minibatches", _BATCH, parts_of("rollout_batch_size")),
    (
        "ppo_micro_batch_size_per_gpu ppo_micro_batch_size",
        "train.tokens_per_microbatch",
        _MICRO,
        samples_to_tokens("max_prompt_length", "max_response_length", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    ),
    ("ppo_max_token_len_per_gpu", "train.tokens_per_microbatch", "it must hold the longest sample"),
    ("critic.ppo_epochs", "critic.epochs"),
    ("ppo_epochs", "train.epochs"),
    ("train_files", "data.source", _FILES, _source),
    ("val_files", "data.eval_source", _FILES, _source),
    ("prompt_key", "data.prompt_column"),
    ("answer_key", "data.answer_column"),
    ("image_key", "data.image_column"),
    ("custom_reward_function.path", "reward.rules", _RULE, _rule),
    ("custom_reward_function.name", "reward.rules", _RULE, fixed(None)),
    ("filter_overlong_prompts", "data.overlong_prompts", "", on("drop", "refuse")),
    ("data.max_prompt_length", "data.max_prompt_length"),
    ("data.max_response_length", "rollout.max_response_length"),
    ("data.shuffle", "data.shuffle"),
    ("data.seed", "run.seed"),
    ("actor_rollout_ref.model.path worker.actor.model.model_path", "model.path"),
    ("ref.model.path", "model.reference_path"),
    ("model.trust_remote_code", "model.trust_remote_code"),
    ("enable_gradient_checkpointing", "train.recompute"),
    *_optimizer("actor", "train", "warmup"),
    *_optimizer("critic", "critic", "learning_rate_warmup"),
    ("grad_clip worker.actor.max_grad_norm", "train.clip_grad"),
    ("critic.grad_clip", "critic.clip_grad"),
    ("clip_ratio", "algorithm.clip_low algorithm.clip_high"),
    ("clip_ratio_low", "algorithm.clip_low"),
    ("clip_ratio_high", "algorithm.clip_high"),
    ("clip_ratio_c", "algorithm.clip_dual", "with algorithm.loss = dual_clip"),
    ("cliprange_value", "algorithm.value_clip"),
    ("entropy_coeff", "algorithm.entropy_coefficient"),
    ("use_kl_loss", "algorithm.kl_coefficient", "0 is off", lambda value, _: None if value else 0.0),
    ("kl_loss_coef", "algorithm.kl_coefficient", "", _kl),
    ("kl_loss_type", "algorithm.kl_estimator", "kl is k1, mse k2, low_var_kl k3", named(ESTIMATORS)),
    ("loss_agg_mode", "algorithm.loss_reduction", "", named(_LOSSES)),
    ("policy_loss.loss_mode", "algorithm.loss", "", named({"vanilla": "grpo", "gspo": "gspo"})),
    ("actor.shuffle", "train.shuffle_mini_batch"),
    ("bypass_mode bypass_old_logprob_for_rollout", "algorithm.old_logprobs", "", on("rollout", "trainer")),
    ("adv_estimator", "algorithm.advantage", "", named({name: name for name in _ADVANTAGES})),
    ("norm_adv_by_std_in_grpo", "algorithm.normalize_std"),
    ("algorithm.gamma", "algorithm.gamma"),
    ("algorithm.lam", "algorithm.lam"),
    ("use_kl_in_reward", "algorithm.kl_in_reward"),
    ("kl_penalty", "algorithm.kl_estimator", "kl is k1, mse k2, low_var_kl k3", named(ESTIMATORS)),
    ("kl_ctrl.type", "algorithm.kl_control"),
    (
        "algorithm.kl_coef",
        "algorithm.kl_coefficient",
        "",
        lambda value, facts: 0.0 if facts.get("disable_kl") else value,
    ),
    ("kl_ctrl.kl_coef", "algorithm.kl_coefficient", "with algorithm.kl_in_reward", _reward_kl),
    ("kl_ctrl.horizon", "algorithm.kl_horizon"),
    ("kl_ctrl.target_kl", "algorithm.kl_target"),
    ("filter_groups.enable", "algorithm.drop_uniform_groups"),
    ("max_num_gen_batches", "algorithm.refill_attempts", "", positive),
    ("actor.megatron.tensor_model_parallel_size", "parallel.tensor"),
    ("actor.megatron.pipeline_model_parallel_size", "parallel.pipeline"),
    ("actor.megatron.expert_model_parallel_size", "parallel.expert"),
    ("actor.megatron.expert_tensor_parallel_size", "parallel.expert_tensor"),
    ("actor.megatron.context_parallel_size", "parallel.context"),
    ("ulysses_sequence_parallel_size", "parallel.context"),
    ("rollout.tensor_model_parallel_size worker.rollout.tensor_parallel_size", "rollout.tensor"),
    ("rollout.n", "algorithm.samples_per_prompt"),
    ("rollout.temperature", "rollout.temperature"),
    ("rollout.top_p", "rollout.top_p"),
    ("rollout.top_k", "rollout.top_k", "0 for all tokens, there -1", positive),
    ("rollout.max_num_seqs", "rollout.max_sequences", "of one engine"),
    ("rollout.dtype", "model.dtype", "", named({"bfloat16": "bfloat16", "float32": "float32"})),
    ("rollout.enforce_eager", "rollout.eager"),
    ("rollout.max_num_batched_tokens", "rollout.max_batched_tokens", "of one step of an engine"),
    ("rollout.gpu_memory_utilization", "rollout.memory_fraction", "of the device, for weights and cache together"),
    ("val_kwargs.temperature", "evaluation.temperature"),
    ("val_kwargs.top_p", "evaluation.top_p"),
    ("val_kwargs.top_k", "evaluation.top_k", "0 for all tokens, there -1", positive),
    ("val_kwargs.n", "evaluation.samples"),
    ("critic.model.path", "critic.path"),
    ("critic_warmup", "critic.warmup_steps"),
    ("total_training_steps", "train.steps", "", lambda value, _: value if value > 0 else None),
    ("total_epochs", "train.steps", _EPOCHS, fixed(None)),
    ("save_freq", "checkpoint.every_steps", "0 is off, there -1", positive),
    ("test_freq", "evaluation.every_steps", "0 is off, there -1", positive),
    ("val_before_train", "evaluation.before"),
    ("max_actor_ckpt_to_keep", "checkpoint.keep_last"),
    ("experiment_name", "run.name"),
    ("project_name", "run.wandb_project"),
    ("logger", "run.tensorboard run.wandb run.swanlab", "", _loggers),
    ("default_local_dir", "run.dir"),
)
_LEFT = (
    *without("torchrun starts the ranks: --nproc_per_node, NNODES", "n_gpus_per_node nnodes device"),
    *without(
        "all samples are packed, and spread by their lengths",
        "use_remove_padding use_dynamic_bsz balance_batch truncation",
    ),
    *without(
        "train.tokens_per_microbatch holds for every pass",
        "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size log_prob_max_token_len_per_gpu "
        "log_prob_use_dynamic_bsz forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu "
        "critic.ppo_micro_batch_size_per_gpu critic.ppo_max_token_len_per_gpu critic.ppo_mini_batch_size",
    ),
    *without(
        "Megatron trains, and what does not run is offloaded by itself",
        "strategy param_offload optimizer_offload grad_offload fsdp_config wrap_policy fsdp_size offload",
    ),
    *without(
        "vLLM is the engine, in the same process",
        "rollout.name rollout.mode load_format free_cache_engine enable_chunked_prefill max_model_len",
    ),
    *without(
        "a rule is named in reward.rules: path/to/file.py:function",
        "custom_reward_function.reward_kwargs reward_manager reward_fn_key",
    ),
    *without(
        "it is a rule of reward.rules: overlong(buffer_tokens=512)",
        "overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor overlong_buffer.log",
    ),
    *without("it is always so here", "calculate_log_probs"),
    *without("the same command goes on: checkpoint.resume", "resume_mode resume_from_path"),
    *without("all weights are trained; there are no adapters", "lora_rank lora_alpha target_modules"),
    *without("a sample is one prompt and one response, without tools", "multi_turn.enable multi_turn.tool_config_path"),
    *without("the engine's length is that of prompt and response", "rollout.prompt_length rollout.response_length"),
    *without("greedy is a temperature of 0", "do_sample"),
    *without("a reward model is one of reward.models", "reward_model.enable reward_model.model.path"),
)
VERL = Program(
    "verl",
    "verl",
    (*_SET, *_LEFT),
    frozenset({"actor_rollout_ref", "trainer"}),
    defaults={
        "algorithm.advantage": "gae",
        "algorithm.samples_per_prompt": 1,
        "train.weight_decay": 0.01,
        "train.adam_beta2": 0.999,
        "rollout.tensor": 2,
    },
)
