"""The settings of TRL's GRPOConfig and its model and data arguments; ms-swift has most of the names too."""

from spmd_rl.config.foreign.foreign_row import Facts, Program, Value, fixed, named, on, rows, unless, without
from spmd_rl.config.foreign.mindspeed_names import SCHEDULES

_DEVICE = (
    "samples of a device there; here prompts of all ranks: value x gradient_accumulation_steps x ranks "
    "/ num_generations"
)
_GATHERED = "samples of a round there; here prompts: value / num_generations"
_LOSS = "how the tokens' losses are reduced"
_RULES = "rules with their weights: --reward.rules math_answer 1.0 path/to/file.py:function 0.5"
_STEPS = "optimizer steps there; here rounds of rollout and update: value / (train.minibatches x train.epochs)"
_REPORT = "TensorBoard is on by default, W&B off"
_LOSSES: dict[str, dict[str, Value]] = {
    "grpo": {"algorithm.loss_reduction": "sequence_mean"},
    "dapo": {"algorithm.loss_reduction": "token_mean"},
    "bnpo": {"algorithm.loss_reduction": "token_mean"},
    "dr_grpo": {"algorithm.loss_reduction": "fixed_length"},
    "cispo": {"algorithm.loss": "cispo", "algorithm.loss_reduction": "token_mean"},
}


def _prompts(value: Value, facts: Facts) -> Value:
    ranks, group = facts.number("ranks"), facts.number("num_generations")
    if not ranks or facts.get("generation_batch_size"):
        return None
    return max(1, round(value * (facts.number("gradient_accumulation_steps") or 1) * ranks / (group or 8)))


def _gathered(value: Value, facts: Facts) -> Value:
    group = facts.number("num_generations")
    return max(1, round(value / group)) if group else None


def _minibatches(value: Value, facts: Facts) -> Value:
    accumulated = facts.number("gradient_accumulation_steps")
    return max(1, round(value / accumulated)) if accumulated else None


def _rounds(value: Value, facts: Facts) -> Value:
    if value <= 0:
        return None
    parts = _minibatches(facts.number("steps_per_generation") or 0, facts) or 1
    return max(1, round(value / (parts * (facts.number("num_iterations") or 1))))


def _reports(value: Value, facts: Facts) -> Value:
    named_ones = [value] if isinstance(value, str) else value
    everything = "all" in named_ones
    online = {f"run.{name}": "online" if everything or name in named_ones else "off" for name in ("wandb", "swanlab")}
    return {"run.tensorboard": everything or "tensorboard" in named_ones} | online


def _scaled(value: Value, facts: Facts) -> Value:
    return value if isinstance(value, bool) else {"group": True, "none": False}.get(value)


def _rules(value: Value, facts: Facts) -> Value:
    if not isinstance(value, list) or not all(isinstance(name, str) and ":" in name for name in value):
        return None
    weights = facts.get("reward_weights") or [1.0] * len(value)
    return {"reward.rules": dict(zip(value, map(float, weights), strict=True))}


_SET = rows(
    ("model_name_or_path", "model.path"),
    ("torch_dtype", "model.dtype", "", named({"bfloat16": "bfloat16", "float32": "float32"})),
    ("bf16", "model.dtype", "", on("bfloat16", "float32")),
    ("dataset_name", "data.source"),
    ("dataset_prompt_column", "data.prompt_column"),
    ("system_prompt", "data.system"),
    ("dataset_config", "data.source", "a file of configs/datasets/ names the subset", fixed(None)),
    ("num_generations", "algorithm.samples_per_prompt"),
    ("max_completion_length", "rollout.max_response_length"),
    ("max_prompt_length", "data.max_prompt_length"),
    ("shuffle_dataset", "data.shuffle"),
    ("per_device_train_batch_size", "train.prompts_per_step", _DEVICE, _prompts),
    ("generation_batch_size", "train.prompts_per_step", _GATHERED, _gathered),
    ("gradient_accumulation_steps", "train.tokens_per_microbatch", "a mini-batch is cut by tokens", fixed(None)),
    (
        "steps_per_generation",
        "train.minibatches",
        "here steps_per_generation / gradient_accumulation_steps",
        _minibatches,
    ),
    ("num_iterations", "train.epochs"),
    ("max_steps", "train.steps", _STEPS, _rounds),
    ("num_train_epochs", "train.steps", "here steps: epochs x rows / train.prompts_per_step", fixed(None)),
    ("learning_rate", "train.learning_rate"),
    ("lr_scheduler_type", "train.schedule", "", named(SCHEDULES)),
    ("warmup_ratio", "train.warmup_fraction", "", unless("warmup_steps")),
    ("warmup_steps", "train.warmup_steps"),
    ("weight_decay", "train.weight_decay"),
    ("max_grad_norm", "train.clip_grad"),
    ("adam_beta1", "train.adam_beta1"),
    ("adam_beta2", "train.adam_beta2"),
    ("adam_epsilon", "train.adam_epsilon"),
    ("gradient_checkpointing", "train.recompute"),
    ("beta", "algorithm.kl_coefficient"),
    (
        "epsilon",
        "algorithm.clip_low algorithm.clip_high",
        "",
        lambda value, facts: {"algorithm.clip_low": value} if facts.get("epsilon_high") else value,
    ),
    ("epsilon_high", "algorithm.clip_high"),
    ("delta", "algorithm.clip_dual", "with algorithm.loss = dual_clip, and only on negative advantages"),
    ("scale_rewards", "algorithm.normalize_std", "", _scaled),
    ("loss_type", "algorithm.loss_reduction algorithm.loss", _LOSS, lambda value, _: _LOSSES.get(value)),
    ("importance_sampling_level", "algorithm.loss", "", named({"token": "grpo", "sequence": "gspo"})),
    ("reward_funcs", "reward.rules", _RULES, _rules),
    ("reward_weights", "reward.rules", _RULES, fixed(None)),
    ("temperature", "rollout.temperature"),
    ("top_p", "rollout.top_p"),
    ("top_k", "rollout.top_k", "0 for all tokens", lambda value, _: max(0, value or 0)),
    ("min_p", "rollout.min_p", "", lambda value, _: value or 0.0),
    ("vllm_tensor_parallel_size", "rollout.tensor"),
    ("vllm_gpu_memory_utilization", "rollout.memory_fraction", "of the device, for weights and cache together"),
    ("save_steps", "checkpoint.every_steps"),
    ("save_total_limit", "checkpoint.keep_last"),
    ("resume_from_checkpoint", "checkpoint.resume", "by itself", fixed(None)),
    ("eval_steps", "evaluation.every_steps"),
    ("output_dir", "run.dir"),
    ("run_name", "run.name"),
    ("seed", "run.seed"),
    ("report_to", "run.tensorboard run.wandb run.swanlab", _REPORT, _reports),
    ("num_completions_to_print", "run.samples_logged"),
    ("trust_remote_code", "model.trust_remote_code"),
)
_LEFT = (
    *without(
        "vLLM is always the engine, in the same process; what does not run is offloaded",
        "use_vllm vllm_mode vllm_enable_sleep_mode vllm_server_host vllm_server_port vllm_server_base_url "
        "vllm_model_impl sleep_level offload_model offload_optimizer ds3_gather_for_generation",
    ),
    *without(
        "every step is in metrics.jsonl", "logging_steps logging_first_step logging_strategy log_completions log_level"
    ),
    *without(
        "torchrun starts the ranks, Megatron shares the model: parallel.tensor, parallel.pipeline",
        "deepspeed fsdp fsdp_config ddp_find_unused_parameters",
    ),
    *without(
        "whole responses are trained on; an overlong one may earn less: the rule overlong", "mask_truncated_completions"
    ),
    *without("the reference stays as it was at the start", "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"),
    *without("all columns are kept for rules; data.source says which", "remove_unused_columns"),
    *without(
        "all parameters are trained",
        "use_peft use_lora lora_r lora_rank lora_alpha lora_target_modules lora_dropout load_in_4bit",
    ),
    *without(
        "tokens are weighed by algorithm.correction", "vllm_importance_sampling_correction vllm_importance_sampling_cap"
    ),
    *without("the optimizer is AdamW", "optim"),
    *without("attention is the platform's own", "attn_implementation"),
    *without("it is GRPO where spmd_rl.grpo is started", "rlhf_type"),
    *without("the model's directory at the end is hf/: run.export_hf", "push_to_hub hub_model_id hub_strategy"),
)
TRL = Program(
    "TRL",
    "trl",
    (*_SET, *_LEFT),
    frozenset(
        {
            "num_generations",
            "max_completion_length",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "model_name_or_path",
            "reward_funcs",
            "use_vllm",
            "num_train_epochs",
            "rlhf_type",
        }
    ),
    enough=2,
    defaults={
        "data.max_prompt_length": 512,
        "rollout.max_response_length": 256,
        "algorithm.samples_per_prompt": 8,
        "train.schedule": "linear",
        "train.adam_beta2": 0.999,
    },
)
