"""The training half on one device, without vLLM: its laws, then its speed: python tools/bench_update.py [--size 1.5b]

Log-probabilities against transformers', a group's prompt once or in each sample, weights and memory of an offload, and
tokens a second of an update. Needs torch, transformers, megatron-core and msgspec beside what those bring. The exit
status is 1 where a law does not hold.
"""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd_rl.distributed.sample import Sample
    from spmd_rl.distributed.world import World
    from spmd_rl.platforms.platform import Platform
    from spmd_rl.worker.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
# hidden, ffn, layers, heads, heads of keys, vocabulary
SIZES = {
    "tiny": (128, 256, 2, 4, 2, 512),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "7b8": (3584, 18944, 8, 28, 4, 152064),  # a 7B model of eight layers: it fits with its optimizer
}
LOGPROBS, GRADIENTS, LEFT_BYTES = 1e-3, {"float32": 1e-5, "bfloat16": 1e-2}, 1 << 30
_failed: list[str] = []


def say(part: str, holds: bool = True, **values: object) -> None:
    """Print one line of JSON, and remember what does not hold."""
    print(json.dumps({"part": part, "holds": holds} | values), flush=True)
    if not holds:
        _failed.append(part)


def trainer_of(path: str, platform: "Platform", world: "World", dtype: str, recompute: bool = False) -> "Trainer":
    """Return a trainer of the model in a directory, on the device."""
    from megatron.core import parallel_state

    from spmd_rl.config.config import Config, ModelConfig
    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.worker.trainer import Trainer

    parallel_state.destroy_model_parallel()  # of the trainer before
    base = Config(ModelConfig(path, dtype=dtype))
    train = dataclasses.replace(base.train, logprob_chunk_tokens=7 if dtype == "float32" else 1024)
    config = dataclasses.replace(base, train=dataclasses.replace(train, recompute="full" if recompute else "none"))
    return Trainer(config, read_model_shape(path), platform.device(world.local_rank), world)


def groups_of(vocabulary: int, groups: int, each: int, prompt: int, response: int) -> "list[list[Sample]]":
    """Return samples with fixed contents and all fields that a loss reads."""
    import torch

    from spmd_rl.distributed.sample import Sample

    draw, found = torch.Generator().manual_seed(1), []
    for group in range(groups):
        shared = torch.randint(3, vocabulary, (prompt + group,), generator=draw, dtype=torch.int32)
        members = []
        for index in range(each):
            number, length = group * each + index, response - index
            answer = torch.randint(3, vocabulary, (length,), generator=draw, dtype=torch.int32)
            sample = Sample.of(number, shared, answer, rollout_logprobs=torch.full((length,), -5.0))
            members.append(sample)
        found.append(members)
    return found


def learn(trainer: "Trainer", groups: "list[list[Sample]]", share: bool) -> float:
    """Score and make one step; return the gradient's norm."""
    trainer.packs = [trainer.pack([groups], share)]
    trainer.score("policy")
    total = sum(len(sample.response) for group in groups for sample in group)
    for sample in (sample for group in groups for sample in group):
        sample.put("advantages", math.sin(sample.id + 1.0))
        sample.put("weights", 1.0 / total)
    return trainer.learn("policy", 0, 1e-6).grad_norm


def parity(platform: "Platform", world: "World", root: Path) -> None:
    """Compare log-probabilities with transformers', in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from tiny_models import make_tiny

    for family in FAMILIES:
        path = str(make_tiny(root / family, family))
        trainer = trainer_of(path, platform, world, "float32")
        groups = groups_of(500, 2, 3, 9, 12)
        trainer.packs = [trainer.pack([groups], False)]
        trainer.score("policy")
        reference, worst = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), 0.0
        for sample in (sample for group in groups for sample in group):
            answer = sample.response.long()
            with torch.no_grad():
                logits = reference(sample.tokens.long()[None]).logits[0, len(sample.prompt) - 1 : -1]
            wanted = (logits / trainer.config.rollout.temperature).log_softmax(-1).gather(1, answer[:, None])[:, 0]
            worst = max(worst, float((sample.fields["policy_logprobs"].cpu() - wanted).abs().max()))
        say("log-probabilities as transformers'", worst < LOGPROBS, family=family, worst=worst)


def shared(platform: "Platform", world: "World", root: Path) -> None:
    """Compare a group's prompt computed once with once a sample."""
    for dtype, bound in GRADIENTS.items():
        norms = [
            learn(trainer_of(str(root / "qwen2"), platform, world, dtype), groups_of(500, 2, 4, 33, 40), share)
            for share in (False, True)
        ]
        gap = abs(norms[0] - norms[1]) / norms[0]
        say("a shared prompt's gradient", gap < bound, dtype=dtype, norms=norms, relative=gap)


def model_of(size: str, root: Path) -> str:
    """Return the directory of a random model of a size, with its weights."""
    from tiny_models import make_tiny

    hidden, ffn, layers, heads, kv_heads, vocabulary = SIZES[size]
    widths = {"hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    sizes = {"layers": layers, "vocabulary": vocabulary, "dtype": "bfloat16", "max_positions": 8192}
    return str(make_tiny(root / size, "qwen2", **widths, **sizes))


def offload(platform: "Platform", trainer: "Trainer") -> None:
    """Leave the device and come back."""
    import torch

    if not platform.offloads or platform.free_and_total_bytes is None:
        return say("offload", skipped=f"a {platform.name} has no device memory of its own")
    learner = trainer.learners["policy"]
    learn(trainer, groups_of(500, 1, 2, 64, 256), False)
    before = {name: tensor.cpu() for name, tensor in trainer.models["policy"].weights().items()}
    began = time.perf_counter()
    learner.offload()
    platform.give_back_memory()
    gone, left = time.perf_counter(), torch.accelerator.memory_allocated()
    learner.onload()
    platform.synchronize()
    back = time.perf_counter()
    after = trainer.models["policy"].weights()
    same = all(torch.equal(tensor, after[name].cpu()) for name, tensor in before.items())
    say("offload", same and left < LEFT_BYTES, left_bytes=left, away_seconds=gone - began, back_seconds=back - gone)


def speed(platform: "Platform", trainer: "Trainer", size: str, tokens: int, length: int) -> None:
    """Time a pass and an update."""
    groups = groups_of(500, max(1, tokens // length), 1, length // 10, length - length // 10)
    count = sum(len(sample.tokens) for group in groups for sample in group)

    def seconds(act: Callable[[], object]) -> float:
        act()
        platform.synchronize()
        began = time.perf_counter()
        act()
        platform.synchronize()
        return time.perf_counter() - began

    update = seconds(lambda: learn(trainer, groups, False))
    score = seconds(lambda: trainer.score("policy"))
    say("speed", size=size, tokens=count, score_tokens_s=count / score, update_tokens_s=count / (update - score))


def main() -> int:
    """Run all parts on one device."""
    parser = argparse.ArgumentParser(prog="python tools/bench_update.py", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model that is timed")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="of a micro-batch")
    parser.add_argument("--length", type=int, default=1536, help="of a sequence; a tenth is its prompt")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--platform", default="auto")
    options = parser.parse_args()
    from spmd_rl.platforms import current

    platform = current(options.platform)
    platform.set_environment()
    from spmd_rl.patches import megatron_core
    from spmd_rl.patches.patch import apply_all

    apply_all(megatron_core.PATCHES, platform.patches)
    from spmd_rl.distributed import world as worlds

    world = worlds.start(platform, 600)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        parity(platform, world, root)
        shared(platform, world, root)
        trainer = trainer_of(model_of(options.size, root), platform, world, "bfloat16", options.recompute)
        offload(platform, trainer)
        for tokens in options.tokens:
            speed(platform, trainer, options.size, tokens, min(options.length, tokens))
    print(f"{len(_failed)} do not hold{': ' * bool(_failed)}{', '.join(_failed)}")
    return int(bool(_failed))


if __name__ == "__main__":
    sys.exit(main())
