"""What a configuration asks of a model that it cannot give."""

from spmd_rl.config.config import Config, ParallelConfig
from spmd_rl.config.wording import divisors, either, words
from spmd_rl.models.model_shape import ModelShape

_BYTES = {"float32": 4, "bfloat16": 2}


def model_problems(config: Config, model: ModelShape) -> list[str]:
    """Where the layouts, lengths and memory of a configuration don't suit the model."""
    problems: list[str] = []
    if model.head != "lm":
        problems.append(
            f"model.path = {config.model.path}: it is a {model.architecture}, which scores and does not write; name a "
            "...ForCausalLM model"
        )
    for knob, tensor in (("parallel.tensor", config.parallel.tensor), ("rollout.tensor", config.rollout.tensor)):
        if tensor == 1:
            continue
        obstacles = [f"{count} {what}" for what, count in _cut_by_tensor(model).items() if count % tensor]
        # With fewer key-value heads than ranks, several ranks hold the same head.
        if not _shares_heads(model, tensor):
            obstacles.append(f"{model.kv_heads} key-value heads (neither divides the other)")
        if obstacles:
            fitting = [n for n in range(1, model.heads + 1) if _fits(model, n)]
            problems.append(
                f"{knob} = {tensor}: the model has {' and '.join(obstacles)}; with this model it can be "
                f"{either(fitting)}"
            )
    problems += _context(config, model) + _stages(config, model) + _experts(config, model)
    longest = config.data.max_prompt_length + config.longest_response
    if longest > model.max_positions:
        longer = "rollout" if config.longest_response == config.rollout.max_response_length else "evaluation"
        problems.append(
            f"data.max_prompt_length + {longer}.max_response_length = {config.data.max_prompt_length} + "
            f"{config.longest_response}: the model has {model.max_positions} positions; lower one of them"
        )
    outside = [token for token in config.rollout.stop_token_ids if not 0 <= token < model.vocabulary]
    if outside:
        problems.append(
            f"rollout.stop_token_ids = {either(config.rollout.stop_token_ids)}: {either(outside)} is not in the "
            f"model's vocabulary of {model.vocabulary}; remove it"
        )
    if model.mla is not None:  # one latent vector for keys and values, the same on all ranks
        token_values = model.mla.kv_rank + model.mla.rope_dim
    else:
        token_values = 2 * max(1, model.kv_heads // config.rollout.tensor) * model.head_dim
    sample_bytes = model.layers * token_values * _BYTES[config.model.dtype] * longest
    if config.rollout.cache_gib * 2**30 < sample_bytes:
        problems.append(
            f"rollout.cache_gib = {config.rollout.cache_gib}: one sample of {longest} tokens takes "
            f"{sample_bytes / 2**30:.2g} GiB per rank; raise it, or lower the lengths"
        )
    return problems


def _cut_by_tensor(model: ModelShape) -> dict[str, int]:
    counts = {"attention heads": model.heads}
    if model.experts is None or not all(model.experts.sparse):
        counts["feed-forward channels"] = model.ffn
    if model.experts is not None and model.experts.shared_ffn:
        counts["channels of the shared experts"] = model.experts.shared_ffn
    return counts


def _shares_heads(model: ModelShape, tensor: int) -> bool:
    return model.mla is not None or model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0


def _fits(model: ModelShape, tensor: int) -> bool:
    return _shares_heads(model, tensor) and not any(count % tensor for count in _cut_by_tensor(model).values())


def _context(config: Config, model: ModelShape) -> list[str]:
    parallel = config.parallel
    heads, rest = divmod(model.heads, parallel.tensor)
    if rest or heads % parallel.context == 0:  # a rest is said of parallel.tensor
        return []
    whose = "the model has" if parallel.tensor == 1 else f"with parallel.tensor = {parallel.tensor}, a rank has"
    return [
        f"parallel.context = {parallel.context}: {whose} {heads} attention heads, which its ranks share inside "
        f"attention; it can be {divisors(heads)}"
    ]


def _stages(config: Config, model: ModelShape) -> list[str]:
    parallel = config.parallel
    chunks = parallel.pipeline * parallel.virtual
    stages = f"parallel.pipeline = {parallel.pipeline}"
    if parallel.virtual > 1:
        stages = f"parallel.pipeline x parallel.virtual = {parallel.pipeline} x {parallel.virtual}"
    if model.layers < chunks:
        return [f"{stages}: the model has {model.layers} layers, fewer than stages; lower it"]
    counts = list(parallel.layers_per_stage)
    even = [model.layers // chunks + (chunk >= chunks - model.layers % chunks) for chunk in range(chunks)]
    if counts and (len(counts) != chunks or sum(counts) != model.layers or min(counts) < 1):
        return [
            f"parallel.layers_per_stage = {counts}: {len(counts)} stages with {sum(counts)} layers; it must name "
            f"{chunks} stages with {model.layers} layers together, each 1 or more, such as {words(even)}"
        ]
    if not counts and model.layers % chunks:
        return [
            f"{stages}: the model has {model.layers} layers; it can be {divisors(model.layers)}, or set "
            f"parallel.layers_per_stage to {words(even)}"
        ]
    return []


def _experts(config: Config, model: ModelShape) -> list[str]:
    parallel, rollout, experts = config.parallel, config.rollout, model.experts
    if experts is None:
        return [
            f"{knob} = {value}: the model has no experts; leave it out"
            for knob, value, neutral in (
                ("parallel.expert", parallel.expert, 1),
                ("parallel.expert_tensor", parallel.expert_tensor, 1),
                ("rollout.data", rollout.data, 1),
                ("rollout.expert_parallel", rollout.expert_parallel, False),
            )
            if value != neutral
        ]
    problems: list[str] = []
    group = rollout.tensor * rollout.data
    if experts.count % parallel.expert:
        problems.append(
            f"parallel.expert = {parallel.expert}: the model has {experts.count} experts; it can be "
            f"{divisors(experts.count)}"
        )
    if experts.ffn % parallel.expert_tensor:
        problems.append(
            f"parallel.expert_tensor = {parallel.expert_tensor}: an expert has {experts.ffn} channels; use 1"
        )
    if rollout.expert_parallel and experts.count % group:
        problems.append(
            f"rollout.tensor x rollout.data = {rollout.tensor} x {rollout.data}: with rollout.expert_parallel they "
            f"share the model's {experts.count} experts; their product can be {divisors(experts.count)}"
        )
    if not rollout.expert_parallel and experts.ffn % group:
        problems.append(
            f"rollout.tensor x rollout.data = {rollout.tensor} x {rollout.data}: an expert has {experts.ffn} channels, "
            "which don't divide by them; set rollout.expert_parallel to true, or use fewer ranks"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        problems.append(
            f"parallel.sequence = {parallel.sequence}: experts with parallel.tensor = {parallel.tensor} need it; "
            "set it to true"
        )
    return problems


def training_problems(parallel: ParallelConfig, model: ModelShape, whose: str) -> list[str]:
    """Where the ranks can't share a model beside the policy as they share the policy; `whose`: what to call it."""
    problems: list[str] = []
    if min(parallel.tensor, parallel.context, parallel.pipeline, parallel.virtual) < 1:
        return problems
    tensor, chunks, experts = parallel.tensor, parallel.pipeline * parallel.virtual, model.experts
    if not _fits(model, tensor):
        counts = {"attention heads": model.heads, "key-value heads": model.kv_heads} | _cut_by_tensor(model)
        fitting = [n for n in range(1, model.heads + 1) if _fits(model, n)]
        problems.append(
            f"parallel.tensor = {tensor}: {whose} has {', '.join(f'{n} {what}' for what, n in counts.items())}; with "
            f"it, it can be {either(fitting)}"
        )
    elif model.heads // tensor % parallel.context:
        problems.append(
            f"parallel.context = {parallel.context}: {whose} has {model.heads // tensor} attention heads on a rank; "
            f"with it, it can be {divisors(model.heads // tensor)}"
        )
    if model.layers < chunks:
        problems.append(
            f"parallel.pipeline x parallel.virtual = {parallel.pipeline} x {parallel.virtual}: {whose} has "
            f"{model.layers} layers, fewer than stages; lower it"
        )
    if experts is None:
        return problems
    for knob, size, count, what in (
        ("expert", parallel.expert, experts.count, "experts"),
        ("expert_tensor", parallel.expert_tensor, experts.ffn, "channels in an expert"),
    ):
        if size >= 1 and count % size:
            problems.append(
                f"parallel.{knob} = {size}: {whose} has {count} {what}; with it, it can be {divisors(count)}"
            )
    if tensor > 1 and not parallel.sequence:
        problems.append(f"parallel.sequence = False: {whose} has experts, which need it; set it to true")
    return problems
