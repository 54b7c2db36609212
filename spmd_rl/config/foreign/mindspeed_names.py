"""MindSpeed-RL's settings: megatron_training, actor_config, critic_config, rl_config, generate_config."""

from typing import get_args

from spmd_rl.config.fields import Schedule
from spmd_rl.config.foreign.foreign_row import (
    Facts,
    Program,
    Value,
    fixed,
    list_of,
    named,
    on,
    parts_of,
    positive,
    rows,
    samples_to_tokens,
    without,
)

ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "abs", "k1": "k1", "k2": "k2", "k3": "k3"}
SCHEDULES = {
    **{name: name for name in get_args(Schedule)},
    **{"inverse-square-root": "inverse_sqrt", "WSD": "wsd", "warmup_stable_decay": "wsd"},
}
_BATCH = "prompts of an optimizer step there; here the number of optimizer steps: prompts_per_step / mini-batch size"
_MICRO = "samples there; here tokens, of every pass: samples x (longest prompt + longest response)"
_BLOCK = "of a stage, where recompute_method is block"
_HALF = "DIR is a Hugging Face directory, with the weights: nothing is converted"
_DATA = (
    "prepared .bin and .idx files are not read: name the raw file, as configs/datasets/deepscaler.yaml:FILE.json, "
    "and data.template for its prompt_type"
)
_RULES = "rules with their weights: --reward.rules base_acc 1.0"
_EXPERTS = "the real number of ranks that share experts: there with moe_tp_extend_ep it is multiplied by tensor"
_VIRTUAL = "layers of a part there; here parts of a stage: layers / pipeline / value"
_PACKED = "it must hold the longest sample"
_EXPERT_RANKS = "tensor x data ranks share the experts, with rollout.expert_parallel"
_NO_KL = "there it is 0.01 by default, here 0.0: no reference is loaded"


def _packed(value: Value, facts: Facts) -> Value:
    longest = (facts.number("max_prompt_length", "seq_length") or 0) + (facts.number("max_tokens") or 0)
    return None if isinstance(value, list) or facts.get("use_dynamic_bsz") is False else max(value, int(longest))


def _expert(value: Value, facts: Facts) -> Value:
    return value * (int(facts.number("tensor_model_parallel_size") or 1) if facts.get("moe_tp_extend_ep") else 1)


def _rules(value: Value, facts: Facts) -> dict[str, Value]:
    names = value if isinstance(value, list) else [value]
    weights = facts.get("verifier_weight") or [1.0] * len(names)
    return {"reward.rules": {name: float(weight) for name, weight in zip(names, weights, strict=True)}}


def _source(value: Value, facts: Facts) -> Value:
    if not isinstance(value, str):
        return None
    kinds = {"17k": "dapo_math_17k", "gsm8k": "gsm8k", "geo3k": "geo3k"}
    name = next((ours for part, ours in kinds.items() if part in value.lower()), "deepscaler")
    return f"configs/datasets/{name}.yaml"


def _block(value: Value, facts: Facts) -> Value:
    return value if facts.get("recompute_method") == "block" else None


def _modules(value: Value, facts: Facts) -> Value:
    if facts.get("recompute_granularity") == "full" or not value:
        return None
    attention = ["core_attn"] if facts.get("recompute_granularity") == "selective" else []
    return {"train.recompute": "selective", "train.recompute_modules": [*attention, "mlp", "moe"]}


def _balance(value: Value, facts: Facts) -> Value:
    return 0.0 if facts.get("moe_router_load_balancing_type") == "none" else value


def _engine_experts(value: Value, facts: Facts) -> Value:
    shared = {"rollout.data": value, "rollout.expert_parallel": True}
    return shared if isinstance(value, int) and value > 1 and facts.get("enable_expert_parallel") is not False else None


def _optimizer(section: str, ours: str, note: str = "") -> tuple[tuple[Value, ...], ...]:
    """Return the rows of an optimizer, of the actor's names or of the critic's."""
    start, warmup = f"{section}." if section else "", "learning_rate_" if ours == "critic" else ""
    return (
        (f"{start}lr", f"{ours}.learning_rate"),
        (f"{start}lr_decay_style", f"{ours}.schedule", "", named(SCHEDULES)),
        (f"{start}min_lr", f"{ours}.min_learning_rate"),
        (f"{start}lr_warmup_fraction", f"{ours}.{warmup}warmup_fraction"),
        (f"{start}weight_decay", f"{ours}.weight_decay", note),
        (f"{start}clip_grad", f"{ours}.clip_grad"),
        (f"{start}adam_beta1", f"{ours}.adam_beta1"),
        (f"{start}adam_beta2", f"{ours}.adam_beta2"),
    )


_SET = rows(
    ("global_batch_size", "train.prompts_per_step"),
    ("mini_batch_size", "train.minibatches", _BATCH, parts_of("global_batch_size")),
    (
        "micro_batch_size",
        "train.tokens_per_microbatch",
        _MICRO,
        samples_to_tokens("max_prompt_length", "max_tokens", "use_dynamic_bsz", "max_packing_token_size"),
    ),
    ("max_packing_token_size", "train.tokens_per_microbatch", _PACKED, _packed),
    ("epochs", "train.epochs"),
    ("shuffle_mini_batch", "train.shuffle_mini_batch"),
    (
        "seq_length",
        "data.max_prompt_length",
        "of the prompt",
        lambda value, facts: facts.get("max_prompt_length") or value,
    ),
    ("max_prompt_length", "data.max_prompt_length"),
    ("no_shared_storage", "checkpoint.shared", "false where nodes share no disk; else leave it out", fixed(None)),
    ("train_iters", "train.steps"),
    ("save_interval", "checkpoint.every_steps", "0, our default, saves nothing"),
    ("megatron_training.seed", "run.seed"),
    ("tokenizer_name_or_path", "model.path", _HALF),
    (
        "ref_model_load_path ref_config.load",
        "model.reference_path",
        f"needless where it is model.path; {_HALF}",
        fixed(None),
    ),
    ("data_path", "data.source", _DATA, _source),
    ("prompt_type", "data.template", "the templates have their names"),
    (
        "prompt_type_path",
        "data.template",
        "a .jinja file for each template, in place of one templates.json",
        fixed(None),
    ),
    ("map_keys.prompt", "data.prompt_column"),
    ("map_keys.response", "data.answer_column"),
    ("map_keys.system", "data.system", "a dataset's file has query_column and system_column", fixed(None)),
    ("map_keys.query", "data.source", "a dataset's file has query_column and system_column", fixed(None)),
    ("input", "data.source", "a dataset's file names its columns: configs/datasets/deepscaler.yaml:FILE.json"),
    ("no_shuffle", "data.shuffle", "the opposite", lambda value, _: not value),
    ("full_shuffle_instruction_dataset", "data.shuffle", "", fixed(None)),
    *_optimizer("", "train", "0.01 by default there, here 0.0"),
    ("tensor_model_parallel_size", "parallel.tensor"),
    ("pipeline_model_parallel_size", "parallel.pipeline"),
    ("context_parallel_size", "parallel.context"),
    ("expert_model_parallel_size", "parallel.expert", _EXPERTS, _expert),
    ("moe_tp_extend_ep", "parallel.expert_tensor", "", on(1)),
    ("num_layers_per_virtual_pipeline_stage", "parallel.virtual", _VIRTUAL, fixed(None)),
    ("num_layer_list", "parallel.layers_per_stage", "", list_of),
    ("sequence_parallel", "parallel.sequence", "true by default here"),
    ("bf16", "model.dtype", "", on("bfloat16", "float32")),
    ("recompute_granularity", "train.recompute", "", named({"full": "full", "selective": "selective"})),
    ("recompute_num_layers", "train.recompute_layers", _BLOCK, _block),
    (
        "recompute_activation_function",
        "train.recompute train.recompute_modules",
        "the whole feed-forward block; needless where whole layers are",
        _modules,
    ),
    ("moe_aux_loss_coeff", "train.moe_aux_loss_coefficient", "", _balance),
    (
        "moe_router_load_balancing_type",
        "train.moe_aux_loss_coefficient",
        "aux_loss where it is above 0, and seq_aux_loss is the same: a micro-batch is one sequence",
        lambda value, _: 0.0 if value == "none" else None,
    ),
    *_optimizer("critic_config", "critic"),
    ("clip_ratio", "algorithm.clip_low algorithm.clip_high"),
    ("clip_ratio_low", "algorithm.clip_low"),
    ("clip_ratio_high", "algorithm.clip_high"),
    ("cliprange_value", "algorithm.value_clip"),
    ("adv_estimator", "algorithm.advantage", "", named({"group_norm": "grpo", "gae": "gae"})),
    ("gamma", "algorithm.gamma"),
    ("lam", "algorithm.lam"),
    ("init_kl_coef kl_coeff", "algorithm.kl_coefficient", _NO_KL),
    ("kl_penalty", "algorithm.kl_estimator", "kl is k1, mse k2, low_var_kl k3", named(ESTIMATORS)),
    ("kl_ctrl_type", "algorithm.kl_control"),
    ("kl_horizon", "algorithm.kl_horizon"),
    ("kl_target", "algorithm.kl_target"),
    ("use_kl_in_reward", "algorithm.kl_in_reward"),
    ("entropy_coeff", "algorithm.entropy_coefficient"),
    ("n_samples_per_prompt", "algorithm.samples_per_prompt"),
    ("token_level_loss", "algorithm.loss_reduction", "", on("token_mean", "sequence_mean")),
    ("filter_groups_enable", "algorithm.drop_uniform_groups"),
    ("filter_groups_max_batches", "algorithm.refill_attempts", "", positive),
    ("verifier_function", "reward.rules", _RULES, _rules),
    ("verifier_weight", "reward.rules", _RULES, fixed(None)),
    ("verifier_timeout", "reward.timeout_seconds"),
    ("verifier_parallel num_cpus_for_local_task", "reward.workers", "of a rank"),
    ("use_tensorboard", "run.tensorboard", "TensorBoard and W&B may both be on"),
    ("use_wandb", "run.wandb", "off, offline or online", on("online", "off")),
    ("use_swanlab", "run.swanlab", "off, offline or online", on("online", "off")),
    ("wandb_project", "run.wandb_project"),
    ("wandb_exp_name", "run.name"),
    ("infer_tensor_parallel_size", "rollout.tensor"),
    ("infer_expert_parallel_size", "rollout.data rollout.expert_parallel", _EXPERT_RANKS, _engine_experts),
    ("enable_expert_parallel", "rollout.expert_parallel", "", fixed(None)),
    ("max_num_seqs", "rollout.max_sequences", "of one engine"),
    ("enforce_eager", "rollout.eager"),
    ("enable_prefix_caching", "rollout.prefix_caching", "true by default here"),
    ("max_num_batched_tokens", "rollout.max_batched_tokens", "of one step of an engine"),
    ("npu_deterministic", "run.deterministic"),
    ("use_deter_comp", "run.deterministic"),
    ("gpu_memory_utilization", "rollout.memory_fraction", "of the device, for weights and cache together"),
    (
        "trust_remote_code",
        "model.trust_remote_code",
        "only a tokenizer's code is run here, and few have any",
        fixed(None),
    ),
    ("max_tokens", "rollout.max_response_length", "of a response"),
    ("temperature", "rollout.temperature"),
    ("top_p", "rollout.top_p"),
    ("top_k", "rollout.top_k", "0 for all tokens, there -1", positive),
    ("min_p", "rollout.min_p"),
)
_LEFT = (
    *without(
        "the model's config.json says it",
        "defaults model use_mcore_models spec position_embedding_type normalization "
        "swiglu untie_embeddings_and_output_weights add_qkv_bias group_query_attention num_query_groups rotary_base "
        "vocab_size make_vocab_size_divisible_by max_position_embeddings disable_bias_linear num_layers hidden_size "
        "ffn_hidden_size num_attention_heads attention_softmax_in_fp32 attention_dropout hidden_dropout "
        "init_method_std",
    ),
    *without("the module that is started says it: spmd_rl.grpo or spmd_rl.ppo", "stage"),
    *without(
        "nothing is prepared before training; tools/preprocess_data.py shows and keeps prompts",
        "handler_name output_prefix dataset_additional_keys workers",
    ),
    *without(
        "torchrun starts the ranks: --nproc_per_node, NNODES, with policy, reference and critic on all of them",
        "num_npus actor_resource reference_resource reward_resource critic_resource vit_resource "
        "num_cpus_for_placement_group",
    ),
    *without(
        "all samples are packed, without padding",
        "variable_seq_lengths no_pad_to_seq_lengths reset_attention_mask reset_position_ids pad_to_multiple_of "
        "tokenizer_padding_side tokenizer_not_use_fast tokenizer_type use_remove_padding use_dynamic_bsz "
        "use_dp_batch_balance split num_workers",
    ),
    *without(
        "train.tokens_per_microbatch, .tokens_per_forward_microbatch and .sequences_per_microbatch bound the passes; "
        "without them the longest sample fits",
        "actor_forward_micro_batch_size ref_forward_micro_batch_size ref_max_packing_token_size "
        "actor_max_packing_token_size update_max_packing_token_size dynamic_max_batch_size "
        "ref_dynamic_max_batch_size actor_dynamic_max_batch_size update_dynamic_max_batch_size",
    ),
    *without(
        "a Hugging Face directory is read (model.path, critic.path), and the same command goes on from its own "
        "checkpoints: checkpoint.every_steps, .resume, .load",
        "load save pretrained_checkpoint finetune no_load_optim no_load_rng no_save_optim no_save_rng "
        "integrated_mode_config",
    ),
    *without(
        "it is always so here",
        "use_distributed_optimizer accumulate_allreduce_grads_in_fp32 rule_reward "
        "no_masked_softmax_fusion no_gradient_accumulation_fusion "
        "use_integrated_worker guarantee_order blocking clip_higher_enable offload_train_optimizer "
        "offload_train_grad offload_train_param logprobs optimizer use_flash_attn use_fused_rmsnorm",
    ),
    *without(
        "rank 0 plans one exchange between the ranks; there is no queue to tune",
        "zmq_communication data_strategy transfer_queue_storage_num experience_count_all "
        "actor_logprob_dispatch_size ref_dispatch_size reward_dispatch_size adv_dispatch_size kl_dispatch_size "
        "actor_update_dispatch_size critic_update_dispatch_size critic_value_dispatch_size",
    ),
    *without(
        "launch/env.npu.sh sets what an NPU needs; a variable that is set stays", "runtime_env_path hccl_buffersize"
    ),
    *without("the engine's length is the longest sample", "max_model_len"),
    *without(
        "vLLM's own choice",
        "num_scheduler_steps ascend_scheduler_config_enabled detokenize "
        "dtype infer_pipeline_parallel_size torchair_graph",
    ),
    *without(
        "the optimizer's state, its float32 weights too, waits on the host; a step has it on the device part by part",
        "swap_optimizer reuse_fp32_param",
    ),
    *without("activations are kept or computed again (train.recompute), not moved to the host", "swap_attention"),
    *without(
        "norms are computed again with their layer: train.recompute full, of train.recompute_layers", "recompute_norm"
    ),
    *without(
        "gradients are summed once a mini-batch, after its last micro-batch, and weights gathered once: there is "
        "little to hide",
        "overlap_grad_reduce overlap_param_gather",
    ),
    *without(
        "the platform has its kernels, and none to choose between (platforms/npu.py)",
        "use_ascend_coc use_fused_swiglu use_fused_rotary_pos_emb moe_alltoall_overlap_comm moe_permutation_async_comm",
    ),
    *without(
        "tensor ranks are neighbours, then context, data and pipeline ranks, which send least", "use_tp_pp_dp_mapping"
    ),
    *without("all weights are trained; there are no adapters", "lora_r lora_alpha lora_fusion lora_target_modules"),
    *without(
        "a step ends with its last response: rollout.max_response_length bounds it",
        "async_engine partial_rollout_max_split require_max_age_all_finished",
    ),
    *without(
        "rollout.expert_parallel gives each rank as many experts",
        "expert_map_path eplb_token_collects eplb_token_save_path",
    ),
    *without(
        "run.deterministic, rollout.canary_steps and spmd-rl verify-resume say where numbers differ", "msprobe_config"
    ),
    *without(
        "a sample is one prompt and one response, without tools", "multi_turn_enable tool_config_path max_tool_calls"
    ),
    *without("train.recompute_layers counts them, as block does; without it all are", "recompute_method"),
    *without("layers may divide unevenly: parallel.layers_per_stage", "noop_layers"),
    *without("run.profile.steps, .ranks, .phases and .level profile a run's steps", "profiler_config"),
    *without(
        "long samples are split by Ulysses (all-to-all) only",
        "context_parallel_algo attention_mask_type use_cp_send_recv_overlap",
    ),
    *without(
        "it is a rule of reward.rules: overlong(buffer_tokens=512)",
        "overlong_buffer_enable overlong_buffer overlong_buffer_penalty_factor rollout_max_tokens",
    ),
    *without(
        "evaluation has settings of its own: evaluation.every_steps, evaluation.benchmarks",
        "eval_interval eval_iters log_interval",
    ),
    *without("everything is in run.dir", "wandb_save_dir"),
    *without("throughput is always of the real lengths", "log_max_throughput"),
    *without("there is one samples' seed: run.seed", "sampling_config.seed"),
    *without("the platform says it: run.platform", "distributed_backend"),
    *without("the learning is in float32 or bfloat16", "initial_loss_scale"),
    *without(
        "the critic shares the policy's layout and settings",
        "critic_config.tensor_model_parallel_size critic_config.pipeline_model_parallel_size "
        "critic_config.micro_batch_size critic_config.context_parallel_size critic_config.sequence_parallel "
        "critic_config.recompute_granularity critic_config.num_layer_list "
        "critic_config.expert_model_parallel_size critic_config.bf16",
    ),
    *without(
        "the reference shares the policy's layout",
        "ref_config.tensor_model_parallel_size ref_config.pipeline_model_parallel_size "
        "ref_config.micro_batch_size ref_config.context_parallel_size ref_config.sequence_parallel "
        "ref_config.num_layer_list ref_config.bf16",
    ),
)
MINDSPEED = Program(
    "MindSpeed-RL",
    "mindspeed",
    (*_SET, *_LEFT),
    frozenset({"megatron_training", "actor_config", "rl_config", "generate_config", "ref_config", "critic_config"}),
    of_data=frozenset({"handler_name", "prompt_type", "output_prefix"}),
    defaults={
        "algorithm.kl_coefficient": 0.01,
        "algorithm.samples_per_prompt": 1,
        "train.weight_decay": 0.01,
        "train.adam_beta2": 0.999,
        "rollout.tensor": 8,
        "reward.rules": {"base_acc": 1.0},
    },
)
