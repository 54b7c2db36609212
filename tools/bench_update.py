"""The training half on one device, without vLLM: its laws, then its speed: python tools/bench_update.py [--size 1.5b]

Log-probabilities against transformers', a group's prompt once or in each sample, weights and memory of an offload;
then tokens a second of an update and its model FLOPs utilisation, microseconds a token in the output layer, seconds of
the optimizer, waits for the device, attention by one call against one for each sequence, experts as one product against
one for each. Needs torch, transformers, megatron-core and msgspec beside what those bring. The exit status is 1 where a
law does not hold.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from spmd_rl.distributed.sample import Sample
    from spmd_rl.distributed.world import World
    from spmd_rl.platforms.attention_layout import Attend
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
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "910B": 313e12, "910_93": 376e12}
"""Dense bfloat16 products a second of the data sheets, by what a device's name contains."""
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


def timed(platform: "Platform", act: Callable[[], object]) -> float:
    """Return the seconds of the second call: the first one finds its kernels."""
    act()
    platform.synchronize()
    began = time.perf_counter()
    act()
    platform.synchronize()
    return time.perf_counter() - began


def peak_of(platform: "Platform", asked: float | None) -> tuple[float, str]:
    """Return products a second that the device can make, and who says so."""
    import torch

    if asked:
        return asked * 1e12, "given"
    name = torch.cuda.get_device_name() if platform.device_type == "cuda" else os.environ.get("ASCEND_CHIP", "")
    for part, peak in PEAKS.items():
        if part in name:
            return peak, f"data sheet of {part}"
    side, device = 1024, platform.device(0)
    a = torch.randn(side, side, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    return 2 * side**3 / min(timed(platform, lambda: a @ a) for _ in range(3)), "a product of 1024 x 1024, measured"


def flops_of(trainer: "Trainer", tokens: int, responses: int) -> float:
    """Return 6 x the parameters that each token uses: of experts those it is sent to, the head for responses alone."""
    from spmd_rl.weights.families import hf_tensors

    shape, body, head = trainer.models["policy"].shape, 0.0, 0.0
    for name, size in hf_tensors(shape).items():
        used = shape.experts.per_token / shape.experts.count if shape.experts and ".mlp.experts." in name else 1.0
        if "embed_tokens" not in name and "lm_head" not in name:
            body += used * math.prod(size)
    head = shape.vocabulary * shape.hidden
    return 6.0 * (body * tokens + head * responses)


def speed(
    platform: "Platform", trainer: "Trainer", size: str, tokens: int, length: int, peak: tuple[float, str]
) -> None:
    """Time a pass, an update, the optimizer and the output layer, and count waits."""
    from spmd_rl.testing.device_reads import DeviceReads

    groups = groups_of(500, max(1, tokens // length), 1, length // 10, length - length // 10)
    samples = [sample for group in groups for sample in group]
    count, responses = sum(len(one.tokens) for one in samples), sum(len(one.response) for one in samples)
    score_and_learn = timed(platform, lambda: learn(trainer, groups, False))
    score = timed(platform, lambda: trainer.score("policy"))
    optimizer = trainer.learners["policy"].optimizer
    step = timed(platform, lambda: optimizer.step(1e-6))
    update = score_and_learn - score
    said = {"size": size, "tokens": count, "score_tokens_s": count / score, "update_tokens_s": count / update}
    mfu = flops_of(trainer, count, responses) / (update - step) / peak[0]
    say("speed", **said, mfu=mfu, peak_tflops=peak[0] / 1e12, peak_of=peak[1], optimizer_seconds=step)
    with DeviceReads() as reads:
        learn(trainer, groups, False)
    say("waits of a micro-batch, scored and learned", waits=reads.total, by_name=dict(reads.counts))
    say("head", microseconds_a_token=head_seconds(platform, trainer, responses) / responses * 1e6)


def head_seconds(platform: "Platform", trainer: "Trainer", count: int) -> float:
    """Return the seconds of the output layer over so many response tokens, forward and backward."""
    import torch

    from spmd_rl.training.token_logprobs import token_logprobs

    shape, chunk = trainer.models["policy"].shape, trainer.config.train.logprob_chunk_tokens
    device, dtype = trainer.device, trainer.models["policy"].dtype
    weight = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=dtype).requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, device=device)
    hidden = torch.randn(count, shape.hidden, device=device, dtype=dtype).requires_grad_()
    targets = torch.arange(count, device=device) % shape.vocabulary
    return timed(platform, lambda: token_logprobs(hidden, weight, targets, 1.0, 0, None, chunk)[0].sum().backward())


def _there_and_back(attend: "Attend", *inputs: "torch.Tensor") -> None:
    attend(*inputs, 0.125).sum().backward()


def attention(platform: "Platform", device: "torch.device", tokens: int) -> None:
    """Time sequences of 256, 1k and 4k tokens: the platform's one call, and a call for each."""
    import torch

    from spmd_rl.platforms.attention_layout import AttentionLayout, QuerySequence
    from spmd_rl.platforms.sdpa_attention import prepare_sdpa

    for length in (256, 1024, 4096):
        if length > tokens:
            continue
        ends = range(0, tokens - length + 1, length)
        layout = AttentionLayout(tuple(QuerySequence(start, start + length) for start in ends), device)
        heads, dtype = (8, 2, 2), torch.float32 if device.type == "cpu" else torch.bfloat16
        q, k, v = (torch.randn(ends[-1] + length, n, 64, device=device, dtype=dtype).requires_grad_() for n in heads)
        found = {}
        for name, prepare in (("one_call", platform.attention), ("loop", prepare_sdpa)):
            found[name] = timed(platform, partial(_there_and_back, prepare(layout), q, k, v)) * 1e3
        say("attention", length=length, milliseconds=found, times_as_fast=found["loop"] / found["one_call"])


def experts(platform: "Platform", device: "torch.device", tokens: int) -> None:
    """Time the products of 32 experts, forward and backward: the platform's, and one by one as Megatron has them."""
    import torch

    from spmd_rl.platforms.grouped_matmul import ExpertCounts

    count, hidden, channels = 32, 256, 128
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
    stacked = torch.randn(count, channels, hidden, device=device, dtype=dtype).requires_grad_()
    apart = [own.detach().clone().requires_grad_() for own in stacked]
    sizes = torch.randint(0, count, (tokens,)).bincount(minlength=count)

    def by_expert() -> None:
        parts = x.split(sizes.tolist())
        torch.cat([part @ own.t() for part, own in zip(parts, apart, strict=True)]).sum().backward()

    counts = sizes.to(device)
    together = timed(platform, lambda: platform.grouped_matmul(x, stacked, ExpertCounts(counts)).sum().backward())
    alone = timed(platform, by_expert)
    say("experts", count=count, tokens=tokens, milliseconds=together * 1e3, times_as_fast=alone / together)


def main() -> int:
    """Run all parts on one device."""
    parser = argparse.ArgumentParser(prog="python tools/bench_update.py", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model that is timed")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="of a micro-batch")
    parser.add_argument("--length", type=int, default=1536, help="of a sequence; a tenth is its prompt")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--peak-tflops", type=float, help="dense products of the device, 10^12 a second")
    options = parser.parse_args()
    from spmd_rl.platforms import current

    platform = current(options.platform)
    platform.set_environment()
    from spmd_rl.patches import megatron_core, torch_gloo
    from spmd_rl.patches.patch import apply_all

    apply_all(megatron_core.PATCHES + torch_gloo.PATCHES, platform.patches)
    from spmd_rl.distributed import world as worlds

    world = worlds.start(platform, 600)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        parity(platform, world, root)
        shared(platform, world, root)
        trainer = trainer_of(model_of(options.size, root), platform, world, "bfloat16", options.recompute)
        offload(platform, trainer)
        peak = peak_of(platform, options.peak_tflops)
        for tokens in options.tokens:
            speed(platform, trainer, options.size, tokens, min(options.length, tokens), peak)
            attention(platform, trainer.device, tokens)
            experts(platform, trainer.device, tokens)
    print(f"{len(_failed)} do not hold{': ' * bool(_failed)}{', '.join(_failed)}")
    return int(bool(_failed))


if __name__ == "__main__":
    sys.exit(main())
