"""Do the tests notice? In twenty places of the formulas, the planner, the plan of a refresh and the packing, change a
sign, a bound or an index in a copy of the source, and run the tests that keep its law. In as many more, take out what
NPUs and GPUs need (the table of docs/accelerators.md has the same order).

    python tools/mutations.py            all of them; the exit status is 1 when more than one goes unnoticed
    python tools/mutations.py 3 17       some
    python tools/mutations.py --devices  those of NPUs and GPUs
    python tools/mutations.py --quick    by the quick set alone
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MAY_SLIP = 1


class Mutation(NamedTuple):
    """One change: `old`, which stands once in `file`, becomes `new`; `tests` are to notice."""

    file: str
    old: str
    new: str
    tests: str


# By the tests that are to notice: file of spmd_rl/, what stands there once, and what it becomes.
_CHANGES = {
    "tests/algorithms": (
        ("algorithms/advantage.py", "(len(values) - 1)) + std", "len(values)) + std"),
        ("algorithms/advantage.py", "(rewards[i] - mean) / scale", "(mean - rewards[i]) / scale"),
        ("algorithms/kl.py", "torch.expm1(d) - d", "torch.expm1(d) + d"),
        ("algorithms/kl.py", "0.5 * d.square()", "d.square()"),
        ("algorithms/policy_loss.py", "torch.maximum(unclipped", "torch.minimum(unclipped"),
        (
            "algorithms/policy_loss.py",
            "torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)",
            "torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_low)",
        ),
        ("algorithms/reduce.py", "1.0 / (samples * tokens)", "1.0 / (len(loss_tokens) * tokens)"),
        ("algorithms/schedule.py", "peak * (step + 1)", "peak * step"),
        ("algorithms/score_normalization.py", "distance**2 * self.count", "distance * self.count"),
    ),
    "tests/controller/test_planner.py": (
        ("controller/planner.py", "(index + 1) // count]", "(index + 1) // count - 1]"),
        ("controller/planner.py", "if max(tokens) <= budget", "if min(tokens) <= budget"),
        ("controller/planner.py", "if room[node] < tokens:", "if room[node] <= tokens:"),
        ("controller/planner.py", "for ticket in tickets]) - len(", "for ticket in tickets]) + len("),
    ),
    "tests/weights/transfer/test_boxes.py": (
        ("weights/transfer/boxes.py", "if low >= high:", "if low > high:"),
        ("weights/transfer/boxes.py", "low, high = max(a0, b0)", "low, high = min(a0, b0)"),
        ("weights/transfer/boxes.py", "tuple(a + b - s for", "tuple(a + b + s for"),
    ),
    "tests/weights/transfer": (
        ("weights/transfer/transfer_schedule.py", "room[supplier] -= bundle.elements", "pass"),
        ("weights/transfer/suppliers.py", "piece.elements:\n            raise", "0:\n            raise"),
    ),
    "tests/training/test_packing.py": (
        ("training/packing.py", "before[0] = start + len(prompt) - 1", "before[0] = start + len(prompt)"),
        ("training/packing.py", "lay(response[:-1], after, sample)", "lay(response[:-1], 0, sample)"),
        ("training/packing.py", "(predicting < end)", "(predicting <= end)"),
    ),
}
_FORMULAS = [
    Mutation(f"spmd_rl/{file}", old, new, tests) for tests, changes in _CHANGES.items() for file, old, new in changes
]
_DEVICE_MEMORY = (
    "tests/worker/test_device_memory.py::"
    "test_every_phases_peak_is_what_plan_prints_and_a_device_of_just_that_size_will_do"
)
_EXPERTS = (
    "tests/rollout/test_engine_weights.py::test_experts_are_written_where_they_are_and_what_sleep_loses_comes_back"
)
_DEVICES = [
    Mutation(
        "spmd_rl/patches/megatron_core.py",
        '(("cpu", "torch."), ("npu", "torch.npu."))',
        '(("cpu", "torch."),)',
        "tests/patches/test_patches.py::test_megatrons_optimizers_see_the_types_that_they_compare_with",
    ),
    Mutation(
        "spmd_rl/worker/train_worker.py",
        "            learner.offload()\n        platform.give",
        "            pass\n        platform.give",
        _DEVICE_MEMORY,
    ),
    Mutation(
        "spmd_rl/rollout/options.py",
        "min(_SHARE, _OF_FREE * free / total)",
        "_SHARE",
        "tests/rollout/test_options.py::test_vllm_finds_as_much_free_as_it_was_told",
    ),
    Mutation(
        "spmd_rl/patches/vllm.py",
        '("vllm", ">=0.23,<0.24", "npu")',
        '("vllm", ">=0.18,<0.24", "npu")',
        "tests/patches/test_patches.py::test_an_engine_that_does_not_heed_the_size_of_its_cache_is_refused",
    ),
    Mutation(
        "spmd_rl/worker/device_switch.py",
        "        self.platform.give_back_memory()\n        self.engine.wake",
        "        self.engine.wake",
        _DEVICE_MEMORY,
    ),
    Mutation(
        "spmd_rl/training/learner.py",
        "        self.gradients.release()\n        self.optimizer.offload()",
        "        self.gradients.release()",
        _DEVICE_MEMORY,
    ),
    Mutation(
        "spmd_rl/patches/vllm.py",
        '("vllm", ">=0.23,<0.24", "npu"),',
        "",
        "tests/patches/test_patches.py::test_a_second_group_of_engines_counts_its_ranks_from_its_own_first",
    ),
    Mutation(
        "spmd_rl/platforms/npu.py",
        "    _custom_operators()\n",
        "",
        "tests/platforms/test_npu.py::test_a_die_is_touched_before_torch_cuda_means_it_and_after_its_operators_are_known",
    ),
    *(
        Mutation("launch/env.npu.sh", old, new, "tests/launch/test_env_npu.py")
        for old, new in (
            ("${ATB_HOME_PATH:-}", "${ASCEND_HOME_PATH:-}"),
            ("    set +eu +o pipefail\n", ""),
        )
    ),
    *(
        Mutation("spmd_rl/rollout/engine_weights.py", old, new, tests)
        for old, new, tests in (
            ("self.weights.replaced(before)", "pass", _EXPERTS),
            ("self._parameters[name].data.transpose(1, 2)", "self._parameters[name].data", _EXPERTS),
            ("tensor.copy_(values)", "pass", _EXPERTS),
            (
                "plain_tensors(self.weights.model, _dispatchers())",
                "plain_tensors(self.weights.model)",
                "tests/rollout/test_engine_weights.py::test_what_vllm_ascend_keeps_beside_the_model_comes_back_too",
            ),
        )
    ),
    Mutation(
        "spmd_rl/platforms/npu.py",
        "max(_LEAST_BUFFER_MIB, -(-2 * (dispatched + combined) // 2**20))",
        "_LEAST_BUFFER_MIB",
        "tests/platforms/test_npu.py::test_hccls_buffers_hold_what_the_experts_kernels_send",
    ),
    Mutation(
        "spmd_rl/platforms/cuda.py",
        ', "moe_backend": "triton"',
        "",
        "tests/platforms/test_engine_options.py::"
        "test_experts_on_gpus_run_on_kernels_that_leave_weights_as_a_refresh_writes_them",
    ),
    Mutation(
        "spmd_rl/training/offload.py",
        "block_sizes(sum(map(len, self._whole)))",
        "map(len, self._whole)",
        "tests/training/test_offload.py::test_hundreds_of_tensors_wait_in_a_few_blocks_and_come_back",
    ),
]
MUTATIONS = [*_FORMULAS, *_DEVICES]


def noticed(mutation: Mutation, quick: bool) -> str:
    """Return the test that fails of a copy with the change; empty: none does."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "source"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "models", "checkpoints"))
        file = copy / mutation.file
        file.write_text(file.read_text(encoding="utf-8").replace(mutation.old, mutation.new), encoding="utf-8")
        options = [
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow" + " and not spmd and not long" * quick,
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *mutation.tests.split()],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0] if done.returncode == 1 and failed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help=f"0 to {len(MUTATIONS) - 1}; default: all")
    parser.add_argument("--quick", action="store_true", help="by the quick set alone")
    parser.add_argument("--devices", action="store_true", help="those of NPUs and GPUs")
    options = parser.parse_args()
    numbers = options.numbers or range(len(_FORMULAS) if options.devices else 0, len(MUTATIONS))
    slipped = 0
    for number in numbers:
        mutation = MUTATIONS[number]
        by = noticed(mutation, options.quick)
        slipped += not by
        print(
            f"{number:>2}  {mutation.file}: {mutation.old!r} -> {mutation.new!r}\n    {by or 'NOT NOTICED'}", flush=True
        )
    print(f"{len(numbers) - slipped} of {len(numbers)} were noticed")
    sys.exit(slipped > MAY_SLIP)


if __name__ == "__main__":
    main()
