"""Say what a configuration asks of a model that it cannot give."""

from collections.abc import Sequence

from spmd_rl.config.config import Config, ParallelConfig
from spmd_rl.config.engine_cache import GIB, token_bytes
from spmd_rl.config.rollout_config import EngineConfig, RolloutConfig
from spmd_rl.config.wording import divisors, either, words
from spmd_rl.errors import Problem
from spmd_rl.models.model_shape import ModelShape

_NO_EXPERTS = ("the model has no experts", "leave it out")


def model_problems(config: Config, model: ModelShape) -> list[Problem]:
    """Return where the layouts, lengths and memory of a run don't suit the model."""
    rollout, parallel = config.rollout, config.parallel
    longest = config.data.max_prompt_length + config.longest_response
    longer = "rollout" if config.longest_response == rollout.max_response_length else "evaluation"
    problems = policy_problems("model.path", config.model.path, model)
    freeze = config.model.freeze
    if "none" in freeze and len(freeze) > 1:
        problems.append(Problem("model.freeze", " ".join(freeze), "none leaves nothing frozen", "leave out the others"))
    problems += training_problems(parallel, model) + _uneven_stages(parallel, model)
    if model.experts is None:
        sizes = {"parallel.expert": parallel.expert, "parallel.expert_tensor": parallel.expert_tensor}
        problems += [Problem(knob, size, *_NO_EXPERTS) for knob, size in sizes.items() if size != 1]
        if weight := config.train.moe_aux_loss_coefficient:
            problems.append(Problem("train.moe_aux_loss_coefficient", weight, *_NO_EXPERTS))
    problems += _replay_problems(rollout, model)
    problems += engine_problems(
        *(rollout, rollout.tensor, "rollout.tensor", model),
        *(config.model.dtype, longest, rollout.data, rollout.max_sequences),
    )
    problems += positions_problems(
        f"data.max_prompt_length + {longer}.max_response_length",
        f"{config.data.max_prompt_length} + {config.longest_response}",
        longest,
        model,
    )
    return problems + stop_problems("rollout.stop_token_ids", rollout.stop_token_ids, model)


def _replay_problems(rollout: RolloutConfig, model: ModelShape) -> list[Problem]:
    knob, met = "rollout.router_replay", ""
    if not rollout.router_replay:
        return []
    if model.experts is None:
        return [Problem(knob, True, *_NO_EXPERTS)]
    if rollout.data != 1:
        met = f"rollout.data = {rollout.data}: engines that share experts choose for each other's tokens"
        return [Problem(knob, True, met, "set rollout.data to 1, or leave it out")]
    if not rollout.prefix_caching:
        met = "rollout.prefix_caching = False: vLLM keeps what it chose beside its cache"
        return [Problem(knob, True, met, "leave one of them out")]
    return []


def policy_problems(knob: str, path: str, model: ModelShape) -> list[Problem]:
    """Return a problem where a model that is to write has no language-model head."""
    if model.head == "lm":
        return []
    met = f"it is a {model.architecture}, which scores and does not write"
    return [Problem(knob, path, met, "name a ...ForCausalLM model")]


def positions_problems(knob: str, value: str, longest: int, model: ModelShape) -> list[Problem]:
    """Return a problem where a sample of so many tokens is longer than the model's positions."""
    if longest <= model.max_positions:
        return []
    return [Problem(knob, value, f"the model has {model.max_positions} positions", "lower one of them")]


def stop_problems(knob: str, tokens: Sequence[int], model: ModelShape) -> list[Problem]:
    """Return a problem where tokens that end a response are none of the model's."""
    outside = [token for token in tokens if not 0 <= token < model.vocabulary]
    if not outside:
        return []
    met = f"{either(outside)} is not in the model's vocabulary of {model.vocabulary}"
    return [Problem(knob, either(tokens), met, "remove it")]


def engine_problems(
    engine: EngineConfig,
    tensor: int,
    tensor_knob: str,
    model: ModelShape,
    dtype: str,
    longest: int,
    data: int | None = None,
    sequences: int | None = None,
) -> list[Problem]:
    """Return where `tensor` x `data` ranks can't hold the model in an engine, or its cache not a sample.

    `longest`: tokens of a sample, at most. `data` None: there is no such setting. `sequences`: that run at once.
    """
    problems = _tensor(tensor_knob, tensor, model) + _engine_experts(engine, tensor, tensor_knob, data, model)
    if engine.max_batched_tokens is not None and engine.max_batched_tokens < (sequences or 1):
        met = f"each of the {sequences} sequences that run at once has a token in a step"
        way = f"{sequences} or more, or a smaller {engine.prefix}max_sequences"
        problems.append(Problem(f"{engine.prefix}max_batched_tokens", engine.max_batched_tokens, met, way))
    if engine.cache_gib is None:
        return problems
    if engine.memory_fraction is not None:
        met = f"{engine.prefix}memory_fraction = {engine.memory_fraction} says it too"
        problems.append(Problem(f"{engine.prefix}cache_gib", engine.cache_gib, met, "leave one of them out"))
    sample_bytes = token_bytes(model, tensor, dtype) * longest
    if engine.cache_gib * GIB < sample_bytes:
        met = f"one sample of {longest} tokens takes {sample_bytes / GIB:.2g} GiB per rank"
        problems.append(Problem(f"{engine.prefix}cache_gib", engine.cache_gib, met, "raise it, or lower the lengths"))
    return problems


def _engine_experts(
    engine: EngineConfig, tensor: int, tensor_knob: str, data: int | None, model: ModelShape
) -> list[Problem]:
    experts, group = model.experts, tensor * (data or 1)
    flag = f"{engine.prefix}expert_parallel"
    if experts is None:
        shared = [] if data in (None, 1) else [Problem(f"{engine.prefix}data", data, *_NO_EXPERTS)]
        return shared + ([Problem(flag, True, *_NO_EXPERTS)] if engine.expert_parallel else [])
    knob, value = tensor_knob, str(tensor)
    if data is not None:
        knob, value = f"{tensor_knob} x {engine.prefix}data", f"{tensor} x {data}"
    if engine.expert_parallel and experts.count % group:
        met = f"with {flag} they share the model's {experts.count} experts"
        return [Problem(knob, value, met, f"their product can be {divisors(experts.count)}")]
    if not engine.expert_parallel and experts.ffn % group:
        met = f"an expert has {experts.ffn} channels, which don't divide by them"
        return [Problem(knob, value, met, f"set {flag} to true, or use fewer ranks")]
    return []


def _tensor(knob: str, tensor: int, model: ModelShape, whose: str = "the model") -> list[Problem]:
    if tensor == 1:
        return []
    obstacles = [f"{count} {what}" for what, count in _cut_by_tensor(model).items() if count % tensor]
    # With fewer key-value heads than ranks, several ranks hold the same head.
    if not _shares_heads(model, tensor):
        obstacles.append(f"{model.kv_heads} key-value heads (neither divides the other)")
    if not obstacles:
        return []
    fitting = either(n for n in range(1, model.heads + 1) if _fits(model, n))
    return [Problem(knob, tensor, f"{whose} has {' and '.join(obstacles)}", f"with this model it can be {fitting}")]


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


def training_problems(parallel: ParallelConfig, model: ModelShape, whose: str = "the model") -> list[Problem]:
    """Return where the ranks that train can't share a model; `whose`: what to call it."""
    if min(parallel.tensor, parallel.context, parallel.pipeline, parallel.virtual) < 1:
        return []
    problems = _tensor("parallel.tensor", parallel.tensor, model, whose)
    heads, rest = divmod(model.heads, parallel.tensor)
    if not rest and heads % parallel.context:  # a rest is said of parallel.tensor
        its = f"{whose} has {heads} attention heads"
        if parallel.tensor > 1:
            its = f"with parallel.tensor = {parallel.tensor}, a rank has {heads} attention heads of {whose}"
        met = f"{its}, which its ranks share inside attention"
        problems.append(Problem("parallel.context", parallel.context, met, f"it can be {divisors(heads)}"))
    if model.layers < parallel.pipeline * parallel.virtual:
        met = f"{whose} has {model.layers} layers, fewer than stages"
        problems.append(Problem(*_stages(parallel), met, "lower it"))
    if model.experts is None:
        return problems
    for knob, size, count, met in (
        ("expert", parallel.expert, model.experts.count, f"{whose} has {model.experts.count} experts"),
        (
            "expert_tensor",
            parallel.expert_tensor,
            model.experts.ffn,
            f"an expert of {whose} has {model.experts.ffn} channels",
        ),
    ):
        if size >= 1 and count % size:
            problems.append(Problem(f"parallel.{knob}", size, met, f"it can be {divisors(count)}"))
    if parallel.tensor > 1 and not parallel.sequence:
        met = f"{whose} has experts, which need it with parallel.tensor = {parallel.tensor}"
        problems.append(Problem("parallel.sequence", False, met, "set it to true"))
    return problems


def room_problems(config: Config, whose: str, shape: ModelShape) -> list[Problem]:
    """Return where the ranks can't share a model beside the policy as they share it, or samples are too long for it."""
    problems = training_problems(config.parallel, shape, whose)
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if longest > shape.max_positions:
        value = f"{config.data.max_prompt_length} + {config.rollout.max_response_length}"
        met = f"{whose} has {shape.max_positions} positions"
        knob = "data.max_prompt_length + rollout.max_response_length"
        problems.append(Problem(knob, value, met, "lower one of them"))
    return problems


def _stages(parallel: ParallelConfig) -> tuple[str, str]:
    """Return the knobs and values of the number of stages."""
    if parallel.virtual == 1:
        return "parallel.pipeline", str(parallel.pipeline)
    return "parallel.pipeline x parallel.virtual", f"{parallel.pipeline} x {parallel.virtual}"


def _uneven_stages(parallel: ParallelConfig, model: ModelShape) -> list[Problem]:
    """Return a problem where the policy's layers don't divide as they are to."""
    chunks, counts = parallel.pipeline * parallel.virtual, list(parallel.layers_per_stage)
    if model.layers < chunks:
        return []
    even = words(model.layers // chunks + (chunk >= chunks - model.layers % chunks) for chunk in range(chunks))
    if counts and (len(counts) != chunks or sum(counts) != model.layers or min(counts) < 1):
        met = f"{len(counts)} stages with {sum(counts)} layers"
        way = f"it must name {chunks} stages with {model.layers} layers together, each 1 or more, such as {even}"
        return [Problem("parallel.layers_per_stage", counts, met, way)]
    if not counts and model.layers % chunks:
        way = f"it can be {divisors(model.layers)}, or set parallel.layers_per_stage to {even}"
        return [Problem(*_stages(parallel), f"the model has {model.layers} layers", way)]
    return []
