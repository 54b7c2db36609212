"""List what we rely on, row by row: the kind of proof, where it stands, and why we need it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tools.npu_contract.wheel import Wheel

Kind = Literal["says", "not", "runtime", "defines", "lacks", "call", "no call", "library", "requires", "entry", "patch"]


@dataclass(frozen=True)
class Row:
    """One assumption."""

    kind: Kind
    """says, not: a pattern is in a file, or not. runtime: a name of torch.npu. defines, lacks: a function with
    parameters. call: an operator takes such a call. library: a string in libtorch_npu.so. requires, entry: metadata."""
    package: str
    place: str
    """A file, or an operator."""
    what: str
    why: str
    profile: str = ""
    """Places where it holds; "": in all."""


_WORKER = "vllm_ascend/worker/worker.py"
_RUNNER = "vllm_ascend/worker/model_runner_v1.py"
_CAMEM = "vllm_ascend/device_allocator/camem.py"
_REDIRECTION = "torch_npu/contrib/transfer_to_npu.py"
_DISTRIBUTED = "torch_npu/distributed/distributed_c10d.py"
_CORE = "megatron/core/"
_STRATEGIES = _CORE + "dist_checkpointing/strategies/"


def _says(package: str, place: str, *rows: tuple[str, ...]) -> list[Row]:
    return [Row("says", package, place, *row) for row in rows]


def _not(package: str, place: str, *rows: tuple[str, ...]) -> list[Row]:
    return [Row("not", package, place, *row) for row in rows]


ROWS: tuple[Row, ...] = (
    Row("requires", "vllm_ascend", "METADATA", "torch-npu==", "a profile is a set that vllm-ascend itself pins"),
    Row("entry", "torch_npu", "torch.backends", "torch_npu:_autoload", "importing torch loads torch_npu"),
    Row("entry", "vllm_ascend", "vllm.platform_plugins", "vllm_ascend:register", "vLLM finds the platform"),
    *(
        Row("runtime", "torch_npu", "torch.npu", name, "platforms/npu.py, or Megatron through torch.cuda")
        for name in (
            "set_device synchronize empty_cache mem_get_info max_memory_reserved reset_peak_memory_stats device_count "
            "current_device Stream Event get_rng_state set_rng_state manual_seed is_initialized get_device_name config"
        ).split()
    ),
    Row("defines", "torch_npu", "torch_npu/npu/memory.py", "_set_allocator_settings(settings)", "expandable segments"),
    Row("library", "torch_npu", "libtorch_npu.so", "resizePrivateUse1Bytes", "offloading resizes storages"),
    *(
        Row("library", "torch_npu", "libtorch_npu.so", name, "we set it")
        for name in "HCCL_CONNECT_TIMEOUT HCCL_EXEC_TIMEOUT HCCL_EVENT_TIMEOUT HCCL_BUFFSIZE TASK_QUEUE_ENABLE".split()
    ),
    Row("library", "torch_npu", "libtorch_npu.so", "HCCL_DETERMINISTIC", "run.deterministic"),
    *_says(
        "torch_npu",
        _REDIRECTION,
        (r"\['cuda', torch_npu\.npu\]", "torch.cuda is torch.npu"),
        (r"torch\.Tensor\.cuda = torch\.Tensor\.npu", "Megatron moves tensors with .cuda()"),
        (r"torch\.nn\.Module\.cuda = torch\.nn\.Module\.npu", "and modules"),
        (r"replace\('nccl', 'hccl'\)", "Megatron's groups over NCCL"),
        (r"torch\.cuda\.default_generators", "Megatron's random states", "0.23"),
    ),
    *_not(
        "torch_npu",
        _REDIRECTION,
        (r"torch\.Tensor\.type\s*=", "the patch of Tensor.type may go"),
        (r"torch\.compile\s*=", "the patch of jit_fuser may go"),
        (r"torch\.cuda\.default_generators", "platforms/npu.py need not set it", "0.18"),
    ),
    Row(
        "says", "torch_npu", "torch_npu/npu/__init__.py", "TORCH_NPU_DEVICE_CAPABILITY", "we set it there only", "0.23"
    ),
    Row(
        "call",
        "torch_npu",
        "npu_fusion_attention",
        "5 atten_mask scale actual_seq_qlen actual_seq_kvlen sparse_mode",
        "attention",
    ),
    Row("call", "torch_npu", "npu_rms_norm", "2 epsilon", "norm"),
    Row(
        "call",
        "torch_npu",
        "npu_grouped_matmul",
        "2 group_list split_item group_type group_list_type",
        "experts at speed",
    ),
    Row("call", "torch_npu", "npu_swiglu", "1 dim", "activation at speed"),
    Row("call", "torch_npu", "npu_rotary_mul", "3", "rotary at speed"),
    Row("no call", "torch_npu", "npu_fused_adamw", "", "torch._fused_adamw_ is the fused step"),
    Row("defines", "torch_npu", _DISTRIBUTED, "_batch_isend_irecv(p2p_op_list)", "messages of a refresh, one group"),
    *(
        Row("defines", "torch_npu", _DISTRIBUTED, what, "experts gather and scatter unequal parts")
        for what in (
            "_reduce_scatter_tensor_uneven(output, input, input_split_sizes)",
            "_all_gather_into_tensor_uneven(output, input, output_split_sizes)",
        )
    ),
    # ---- vllm-ascend: start, sleep, wake
    *_says(
        "vllm_ascend",
        _WORKER,
        (r"free_memory < self\.requested_memory", "it refuses to start: we say how much is free"),
        (r"total_memory \* self\.cache_config\.gpu_memory_utilization", "of the share that we compute"),
        (r"if kv_cache_memory_bytes := self\.cache_config", "rollout.cache_gib is heeded", "0.23"),
        (r"_sleep_saved_buffers = \{name: buffer\.cpu\(\)\.clone\(\)", "level 2 keeps buffers alone"),
        (r"(?s)def wake_up.*?w2_data = param\.transpose\(1, 2\)", "experts wake transposed: Weights.replaced"),
        (r"(?s)def wake_up.*?FRACTAL_NZ mode is enabled", "VLLM_ASCEND_ENABLE_NZ must be 0"),
    ),
    *_not("vllm_ascend", _WORKER, (r"cache_config\.kv_cache_memory_bytes", "0.18 would be a target", "0.18")),
    Row(
        "says", "vllm_ascend", _CAMEM, r"expandable_segments:True.{0,12}not in", "we switch them off around the engine"
    ),
    Row("defines", "vllm_ascend", _CAMEM, "CaMemAllocator.sleep(self, offload_tags)", "sleep"),
    Row("defines", "vllm_ascend", _CAMEM, "CaMemAllocator.wake_up(self, tags)", "wake"),
    Row("defines", "vllm_ascend", _WORKER, "NPUWorker.wake_up(self, tags)", "weights first, then the cache"),
    Row("says", "vllm_ascend", _RUNNER, r"class _EventPlaceholder", "after_engine_start puts torch.cuda.Event back"),
    Row("says", "vllm_ascend", "vllm_ascend/ascend_config.py", "enable_cpu_binding", "an option of ours"),
    Row("says", "vllm_ascend", "vllm_ascend/ascend_config.py", "weight_nz_mode", "an option of ours", "0.23"),
    # ---- vllm-ascend: experts, latent attention, operators
    Row(
        "says",
        "vllm_ascend",
        "vllm_ascend/ops/fused_moe/moe_comm_method.py",
        r"^_MoECommMethods\b",
        "_dispatchers reads it",
    ),
    Row(
        "says",
        "vllm_ascend",
        "vllm_ascend/ops/fused_moe/token_dispatcher.py",
        r"self\.expert_ids_per_ep_rank = torch",
        "lost in a sleep: we keep it",
    ),
    Row("says", "vllm_ascend", "vllm_ascend/ops/fused_moe/fused_moe.py", r"transpose\(1, 2\)", "its layout of experts"),
    Row(
        "says",
        "vllm_ascend",
        "vllm_ascend/attention/mla_v1.py",
        r"self\.W_UK_T\.copy_\(W_UK",
        "what MLA derives is written in place",
    ),
    Row("says", "vllm_ascend", "vllm_ascend/attention/mla_v1.py", r"self\.W_UV\.copy_\(W_UV", "the same"),
    Row(
        "defines",
        "vllm_ascend",
        "vllm_ascend/utils.py",
        "bootstrap_custom_op_env()",
        "it sets ASCEND_CUSTOM_OPP_PATH too late",
        "0.23",
    ),
    Row("defines", "vllm_ascend", "vllm_ascend/utils.py", "check_ascend_device_type()", "an A2 wheel asserts on an A3"),
    Row("says", "vllm_ascend", "vllm_ascend/_build_info.py", r"__device_type__ = '\w+'", "the doctor reads it"),
    # ---- Megatron-Core
    *_says(
        "megatron_core",
        _CORE + "optimizer/distrib_optimizer.py",
        (r"\.type\(\) in \['torch\.cuda\.HalfTensor'", "needs the patch of Tensor.type"),
    ),
    Row("says", "megatron_core", _CORE + "optimizer/clip_grads.py", r"torch\.cuda\.FloatTensor", "the same"),
    Row("says", "megatron_core", _CORE + "jit.py", r"jit_fuser = torch\.compile", "needs the patch of jit_fuser"),
    Row(
        "says",
        "megatron_core",
        _CORE + "models/common/embeddings/rope_utils.py",
        r"\.tolist\(\)",
        "cu_seqlens are on the host",
    ),
    Row("says", "megatron_core", _CORE + "utils.py", r"\[\(torch\.norm\(tensor\)\)", "needs the patch of the norm"),
    Row(
        "says",
        "megatron_core",
        _CORE + "distributed/param_and_grad_buffer.py",
        r"_coalescing_manager",
        "HCCL coalesces",
    ),
    Row(
        "says",
        "megatron_core",
        _CORE + "tensor_parallel/random.py",
        r"from torch\.cuda import _lazy_call",
        "the die first",
    ),
    Row(
        "says",
        "megatron_core",
        _STRATEGIES + "filesystem_async.py",
        r"mp\.get_context\(\"fork\"\)",
        "in_this_process replaces it",
    ),
    Row(
        "defines",
        "megatron_core",
        _STRATEGIES + "filesystem_async.py",
        "FileSystemWriterAsync.write_preloaded_data(transform_list, local_proc_idx, write_bucket, results_queue, "
        "count_queue, use_fsync)",
        "in_this_process calls it",
    ),
    Row(
        "defines",
        "megatron_core",
        _STRATEGIES + "async_utils.py",
        "AsyncCallsQueue._get_async_caller(self)",
        "threads for forks",
    ),
    Row("patch", "megatron_core", "spmd_rl/patches/megatron_core.py", "npu", "every patch for NPUs has its target"),
    # ---- vLLM: read from the index file by file
    Row(
        "says", "vllm", "vllm/config/parallel.py", r"must be in the range", "needs the patch rank_within_group", "0.23"
    ),
    Row("defines", "vllm", "vllm/entrypoints/llm.py", "LLM.sleep(self, level)", "sleep"),
    Row("defines", "vllm", "vllm/entrypoints/llm.py", "LLM.wake_up(self, tags)", "wake"),
    Row(
        "defines",
        "vllm",
        "vllm/v1/executor/uniproc_executor.py",
        "ExecutorWithExternalLauncher.determine_available_memory(self)",
        "ranks agree on the smallest cache",
    ),
)


def check(row: Row, wheels: Mapping[str, Wheel]) -> str:
    """Return why a row does not hold; "" where it does, or its package is not here."""
    wheel = wheels.get(row.package)
    if wheel is None:
        return ""
    match row.kind:
        case "says" | "not":
            if row.place not in wheel.names:
                return "no such file"
            found = re.search(row.what, wheel.text(row.place), re.MULTILINE) is not None
            return "" if found == (row.kind == "says") else "it is there now" if found else "it is not there"
        case "runtime":
            listed = row.what in wheel.exported("torch_npu/npu/__init__.py")
            return "" if listed or wheel.resolves("torch_npu.npu", row.what) else "not in torch.npu"
        case "defines" | "lacks":
            return _definition(row, wheel)
        case "call" | "no call":
            return _call(row, wheel)
        case "library":
            return "" if row.what.encode() in wheel.library else "the library does not have it"
        case "requires" | "entry":
            text = wheel.about("METADATA" if row.kind == "requires" else "entry_points.txt").replace(" ", "")
            return "" if row.what in text else "the metadata does not say it"
        case "patch":
            from spmd_rl.patches.megatron_core import PATCHES

            lost = [one.target for one in PATCHES if one.meets(row.what) and not _target(one.target, wheel)]
            return f"no {', '.join(lost)}" if lost else ""


def _definition(row: Row, wheel: Wheel) -> str:
    name, _, wanted = row.what.rstrip(")").partition("(")
    node = wheel.definition(row.place, name) if row.place in wheel.names else None
    if node is None:
        return "it is not defined"
    spec = node.args  # type: ignore[attr-defined]
    has = {one.arg for one in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
    missing = {one.strip() for one in wanted.split(",") if one.strip()} - has
    return f"it lacks {', '.join(sorted(missing))}" if missing else ""


def _call(row: Row, wheel: Wheel) -> str:
    schemas = wheel.operators.get(row.place, [])
    if row.kind == "no call":
        return "there is such an operator now" if schemas else ""
    positional, *keywords = row.what.split()
    misfits = [one.misfit(int(positional), set(keywords)) for one in schemas]
    return "" if "" in misfits else "; ".join(misfits) or "no such operator"


def _target(target: str, wheel: Wheel) -> bool:
    """Return whether a patch's target is in a wheel, as far as that is one of its modules."""
    module, _, attribute = target.partition(":")
    if not module.startswith("megatron") or module.endswith("*"):
        return True
    file = wheel.module(module)
    # What a library never bound is for a patch to bind.
    return file is not None and (wheel.resolves(module, attribute.split(".")[0]) or attribute == "te_general_gemm")
