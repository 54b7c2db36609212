"""Look at other settings of the same run: which fit, and how fast they would be."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

from spmd_rl.config.check import check
from spmd_rl.config.config import Config
from spmd_rl.config.engine_cache import BYTES
from spmd_rl.config.names import Phase
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.estimate.rank_memory import parts_by_phase
from spmd_rl.estimate.step_time import Held
from spmd_rl.estimate.work import Work
from spmd_rl.plan.case import Case, Json, cache_bytes
from spmd_rl.plan.timing import timing
from spmd_rl.platforms.devices import Device
from spmd_rl.weights.device_memory import RankBytes, rank_bytes

LISTED, _MOST_STAGES = 8, 16
_LAYOUT_SETTINGS = ("parallel.", "rollout.", "train.tokens", "model.path")


@dataclass(frozen=True)
class Candidate:
    """Hold a changed case, what changes, its fullest phase and its speed."""

    changes: dict[str, object]
    phase: str
    bytes: int
    rollout: int
    """Bytes in the rollout."""
    tokens_per_second: float


def judged(case: Case, changes: dict[str, object], device: Device, room: int, work: Work) -> Candidate | None:
    """Return a case as a candidate; None where the layout can't be, or the engine's weights leave no cache."""
    config, world = case.config, case.world_size
    if any(problem.knob.startswith(_LAYOUT_SETTINGS) for problem in check(config, world, case.shape)):
        return None
    phase, most, cache, rollout = "", 0, 0, 0
    stage_ranks = case.train.stage_ranks
    helds = [_held(case, stage * stage_ranks, room) for stage in range(case.train.pipeline)]
    for stage, held in enumerate(helds):
        if not held.cache:
            return None
        cache = held.cache
        for name, parts in parts_by_phase(case.run, held, stage).items():
            size = sum(parts.values())
            rollout = max(rollout, size) if name == Phase.ROLLOUT else rollout
            if size > most:
                phase, most = name, size
    policy = [held.learners["policy"] for held in helds]
    engine, weights = helds[0].engine, max(one.weights for one in policy)
    # An engine's weights come from elsewhere, but for what the rank trains itself.
    same = case.train.pipeline == 1 and case.train.tensor == case.rollout.tensor and not case.shape.experts
    missing = 0 if same else max(0, engine - weights // max(1, case.rollout.tensor // case.train.tensor))
    inside = case.train.pipeline * case.train.tensor * max(1, case.train.expert) <= case.ranks_per_node
    near, far = (missing, 0) if inside else (0, missing)
    held = Held(weights, engine, cache, max(one.optimizer for one in policy), near, far)
    return Candidate(changes, phase, most, rollout, timing(case, device, held, work)["tokens_per_second"])


def _held(case: Case, rank: int, room: int) -> RankBytes:
    buckets = 4 * int((case.config.rollout.refresh_bucket_mib or 256) * 2**20)
    held = rank_bytes(case.config, case.shape, case.train, case.rollout, rank, buckets)
    return replace(held, cache=int(cache_bytes(case, held.engine, room) or 0))


def changed(case: Case, changes: dict[str, object]) -> Case | None:
    """Return the case with other settings; None where the ranks can't be laid out so."""
    config = case.config
    world = int(str(changes.get("--world-size", case.world_size)))
    for name, value in changes.items():
        section, _, setting = name.partition(".")
        if setting:
            part = replace(getattr(config, section), **{setting: value})
            config = replace(config, **{section: part})
    if "parallel.pipeline" in changes:  # the stages' layers are another pipeline's
        config = replace(config, parallel=replace(config.parallel, layers_per_stage=()))
    try:
        train, rollout = TrainLayout.of(config.parallel, world), RolloutLayout.of(config.rollout, world)
        train = train.suited_to(case.shape.layers)
        train.chunk_layers(case.shape.layers)
    except ValueError:
        return None
    if train.world != world:
        return None
    config = replace(config, parallel=replace(config.parallel, layers_per_stage=train.layers_per_stage))
    return replace(case, config=config, train=train, rollout=rollout)


def nearest(case: Case, device: Device, room: int) -> list[Candidate]:
    """Return the changes of one setting, or of two, after which all phases fit; the fastest first."""
    work = Work.of(case.shape)
    single = list(_single_changes(case.config, case.world_size))
    pairs = (one | other for one, other in combinations(single, 2) if one.keys().isdisjoint(other))
    for options in (single, pairs):
        found = [one for one in _judged(case, options, device, room, work) if one.bytes <= room]
        if found:
            break
    return sorted(found, key=lambda one: -one.tokens_per_second)[:3]


def _single_changes(config: Config, world: int) -> Iterator[dict[str, object]]:
    """Yield the changes of one setting that save memory."""
    parallel, rollout, train = config.parallel, config.rollout, config.train
    kinds = ("none", "selective", "full")
    yield from ({"train.recompute": kind} for kind in kinds[kinds.index(train.recomputes) + 1 :])
    tokens = train.microbatch_tokens
    yield from ({"train.tokens_per_microbatch": t} for t in (tokens // 2, tokens // 4) if t >= config.longest_sample)
    for name, value in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline), ("expert", parallel.expert)):
        yield {f"parallel.{name}": 2 * value}
    yield {"rollout.tensor": 2 * rollout.tensor}
    if rollout.data > 1:
        yield {"rollout.data": 2 * rollout.data}
    if rollout.cache_gib:
        yield {"rollout.cache_gib": round(rollout.cache_gib / 2, 2)}
    yield {"--world-size": 2 * world}


def engines(case: Case, work: Work, room: int) -> Iterator[dict[str, object]]:
    """Yield the layouts of rollout whose weights leave room for a cache."""
    shape, world, size = case.shape, case.world_size, BYTES[case.config.model.dtype]
    for tensor in _tensors(case):
        if shape.experts is None:
            if size * work.total / tensor < room:
                yield {"rollout.tensor": tensor}
            continue
        for data in _powers(world // tensor):
            weights = size * ((work.total - work.routed) / tensor + work.routed / (tensor * data))
            if shape.experts.count % (tensor * data) == 0 and world % (tensor * data) == 0 and weights < room:
                yield {"rollout.tensor": tensor, "rollout.data": data, "rollout.expert_parallel": True}


def trainings(case: Case, work: Work, room: int) -> Iterator[dict[str, object]]:
    """Yield the layouts of training whose weights and gradients leave room, and how much is computed again."""
    shape, world, size = case.shape, case.world_size, BYTES[case.config.model.dtype] + 4
    pipelines = [p for p in _divisors(world) if p <= min(_MOST_STAGES, shape.layers)]
    experts = [e for e in _powers(world) if shape.experts.count % e == 0] if shape.experts else [1]
    for tensor, pipeline, expert in product(_tensors(case), pipelines, experts):
        held = size * ((work.total - work.routed) / tensor + work.routed / expert) / pipeline
        if world % (pipeline * tensor) or (world // pipeline) % expert or held > room:
            continue
        training: dict[str, object] = {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
        if shape.experts:
            training["parallel.expert"] = expert
        for recompute in ("none", "full"):
            yield {**training, "train.recompute": recompute}


def _tensors(case: Case) -> list[int]:
    shape = case.shape
    sizes = _powers(min(case.ranks_per_node, case.world_size))
    return [size for size in sizes if shape.heads % size == 0 and shape.kv_heads % size == 0]


def suggest(case: Case, device: Device, room: int) -> list[Candidate]:
    """Return the layouts that fit, by their estimated speed, the fastest first.

    The engines' layouts are compared beside the training as it is, then trainings beside the best of them.
    """
    work = Work.of(case.shape)
    plain = replace(case, config=_without_stages(case.config))
    # Whatever the training takes, the engine's phases are the same.
    rollouts = _judged(case, engines(case, work, room), device, room, work)
    best = sorted((one for one in rollouts if one.rollout <= room), key=lambda one: -one.tokens_per_second)[:2]
    both = (training | one.changes for one in best for training in trainings(case, work, room))
    found = [one for one in _judged(plain, both, device, room, work) if one.bytes <= room]
    found.sort(key=lambda one: -one.tokens_per_second)
    return [replace(one, changes=_differing(case.config, one.changes)) for one in found[:LISTED]]


def _without_stages(config: Config) -> Config:
    """Return the configuration without what belongs to one layout alone."""
    return replace(config, parallel=replace(config.parallel, layers_per_stage=(), virtual=1, expert_tensor=1))


def _differing(config: Config, changes: dict[str, object]) -> dict[str, object]:
    """Return the settings that are not so already."""
    return {
        name: value
        for name, value in changes.items()
        if getattr(getattr(config, name.partition(".")[0]), name.partition(".")[2]) != value
    }


def _without_stages(config: Config) -> Config:
    """Return the configuration without what belongs to one layout alone."""
    return replace(config, parallel=replace(config.parallel, layers_per_stage=(), virtual=1, expert_tensor=1))


def _judged(
    case: Case, options: Iterable[dict[str, object]], device: Device, room: int, work: Work
) -> Iterator[Candidate]:
    for changes in options:
        other = changed(case, changes)
        uneven = other.train.layers_per_stage if other and "parallel.pipeline" in changes else ()
        named = changes | ({"parallel.layers_per_stage": uneven} if uneven else {})
        one = judged(other, named, device, room, work) if other else None
        if one is not None:
            yield one


def as_json(found: list[Candidate]) -> list[Json]:
    """Return candidates for an answer."""
    return [vars(one) for one in found]


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
