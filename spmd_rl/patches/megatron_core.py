"""Changes to Megatron-Core, each with its reason."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spmd_rl.patches import checkpoint_pickles, checkpoint_writes, megatron_gloo, megatron_passes
from spmd_rl.patches.cpu_torch import host_torch
from spmd_rl.patches.patch import EVERYWHERE, MEGATRON_CORE, Patch
from spmd_rl.patches.unread import allocate_buffers_unfilled

_SOURCE = "https://github.com/NVIDIA/Megatron-LM/tree/core_v0.16.1/megatron/core"


def _identity(original: Any) -> Any:
    def identity(value: Any, *args: Any, **options: Any) -> Any:
        return value

    return identity


def _type_of_cuda(own: str) -> Callable[[Any], Any]:
    """Let Tensor.type say "torch.cuda." where it says `own`, and understand it."""

    def make(original: Any) -> Any:
        def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
            if dtype is None:
                return original(self).replace(own, "torch.cuda.", 1)
            named = dtype.replace("torch.cuda.", own) if isinstance(dtype, str) else dtype
            return original(self, named, *args, **options)

        return tensor_type

    return make


def _norm_at_once(original: Any) -> Any:
    """The norm of many tensors, which the device is asked for once and not once a tensor."""

    def norm(chunk_size: int, noop_flag: Any, tensor_lists: Any, per_tensor: bool, *args: Any) -> Any:
        norms = [one for some in tensor_lists if some for one in torch._foreach_norm(list(some))]
        return torch.linalg.vector_norm(torch.stack(norms).float()).reshape(1), None

    return norm


def _get_rng_state(original: Any) -> Any:
    return lambda *args, **options: torch.get_rng_state()


def _set_rng_state(original: Any) -> Any:
    return lambda state, *args, **options: torch.set_rng_state(state)


def _plain_function(original: Any) -> Any:
    """Megatron's `jit_fuser` decorator, doing nothing."""

    def decorate(function: Any) -> Any:
        return function

    return decorate


def _as_it_is(original: Any) -> Any:
    return original


def _host_tensor(original: Any) -> Any:
    def host_tensor(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return host_tensor


def _fill_states(original: Any) -> Any:
    """Fill a parameter and its moments; the count of steps, which torch's Adam keeps for each parameter, is there."""

    def fill(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[main]
        with torch.no_grad():
            main.copy_(tensors["param"])
            for key, value in state.items():
                if key == "step":
                    state[key] = value.clone()  # all parameters were given the same tensor, which each would count up
                else:
                    value.copy_(tensors[key])

    return fill


COALESCE = "SPMD_RL_COALESCE"
"""Variable: with 0 Megatron-Core's collectives are sent one by one."""


def _one_by_one(original: Any) -> Any:
    """Send collectives as they are called, where the variable says so."""

    @contextmanager
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[None]:
        assert not async_ops, f"{COALESCE} = 0 and collectives that overlap with computing"
        yield

    return original if os.environ.get(COALESCE) != "0" else manager


PATCHES = (
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.*:torch",
        platforms=("cpu",),
        reason="Megatron-Core asks torch.cuda for devices, streams and events, and a CPU build of torch has none",
        upstream=f"{_SOURCE}/distributed/param_and_grad_buffer.py",
        until="Megatron-Core asks torch.accelerator instead of torch.cuda",
        make=lambda original: host_torch(),
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="torch:Tensor.cuda",
        platforms=("cpu",),
        reason="Megatron-Core moves tensors with .cuda(), which raises in a CPU build of torch",
        upstream=f"{_SOURCE}/optimizer/clip_grads.py",
        until="Megatron-Core moves tensors with .to(device)",
        make=_identity,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="torch:nn.Module.cuda",
        platforms=("cpu",),
        reason="Megatron-Core moves modules with .cuda(), which raises in a CPU build of torch",
        upstream=f"{_SOURCE}/models/common/vision_module/vision_module.py",
        until="Megatron-Core moves modules with .to(device)",
        make=_identity,
    ),
    *(
        Patch(
            package="megatron-core",
            versions=MEGATRON_CORE,
            target="torch:Tensor.type",
            platforms=(platform,),
            reason="Megatron-Core's optimizers compare tensor.type() with 'torch.cuda.FloatTensor' and refuse anything "
            "else; transfer_to_npu does not change it",
            upstream=f"{_SOURCE}/optimizer/distrib_optimizer.py#L361",
            until="Megatron-Core compares dtypes instead of type strings",
            make=_type_of_cuda(own),
        )
        for platform, own in (("cpu", "torch."), ("npu", "torch.npu."))
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        platforms=("cpu",),
        reason="the random-state tracker reads a CUDA generator, and a CPU has only torch's own",
        upstream=f"{_SOURCE}/tensor_parallel/random.py#L47",
        until="the tracker takes the device of the platform",
        make=_get_rng_state,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        platforms=("cpu",),
        reason="the random-state tracker writes a CUDA generator, and a CPU has only torch's own",
        upstream=f"{_SOURCE}/tensor_parallel/random.py#L77",
        until="the tracker takes the device of the platform",
        make=_set_rng_state,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.jit:jit_fuser",
        platforms=("cpu", "npu"),
        reason="fused functions are compiled with torch.compile at their first call, minutes of C++ on a CPU and no backend on an NPU",
        upstream=f"{_SOURCE}/jit.py#L20",
        until="Megatron-Core lets a configuration turn the fuser off before its modules are imported",
        make=_plain_function,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        platforms=EVERYWHERE,
        reason="the router asks whether te_general_gemm is None, a name that is never bound without Transformer Engine",
        upstream=f"{_SOURCE}/transformer/moe/moe_utils.py#L34",
        until="Megatron-Core binds the name where it also catches the failed import",
        make=_as_it_is,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.utils:local_multi_tensor_l2_norm",
        platforms=("cuda", "npu"),
        reason="without Apex the norm of the gradient waits for the device once a tensor",
        upstream=f"{_SOURCE}/utils.py#L1205",
        until="local_multi_tensor_l2_norm uses torch._foreach_norm",
        make=_norm_at_once,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        platforms=("cpu",),
        reason="the counts of tokens for each expert become numbers only on their way from a GPU, and a host's stay "
        "tensors, which all_to_all_single refuses",
        upstream=f"{_SOURCE}/transformer/moe/moe_utils.py#L1078",
        until="maybe_move_tensor_to_cpu heeds as_numpy for tensors that are on the CPU already",
        make=_host_tensor,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.transformer.multi_latent_attention:HAVE_TE",
        platforms=EVERYWHERE,
        reason="without Transformer Engine its import succeeds with empty names, and latent attention then asks "
        "isinstance of None; our layers have nothing of it",
        upstream=f"{_SOURCE}/transformer/multi_latent_attention.py#L51",
        until="HAVE_TE there says whether Transformer Engine is installed",
        make=lambda original: False,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        platforms=EVERYWHERE,
        reason="a checkpoint has one count of steps for all parameters, and without Transformer Engine or Apex the Adam is "
        "torch's, which keeps one for each: loading then asks the checkpoint for a tensor of it",
        upstream=f"{_SOURCE}/optimizer/distrib_optimizer.py#L911",
        until="the distributed optimizer leaves the key 'step' of an optimizer's state to load_state_dict",
        make=_fill_states,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.distributed.param_and_grad_buffer:_coalescing_manager",
        platforms=EVERYWHERE,
        reason=f"gradients are summed by coalesced collectives, which no one has seen on an NPU: {COALESCE}=0 does without",
        upstream=f"{_SOURCE}/distributed/param_and_grad_buffer.py#L433",
        until="tools.bringup.collectives has passed on NPUs",
        make=_one_by_one,
    ),
    *megatron_gloo.PATCHES,
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
        platforms=("cpu",),
        reason="buffers of the size of the model are filled with zeros at a start, the gradients' to be given back at once "
        "and zeroed again before they are used, the parameters' to be written over by parameters that are not loaded yet",
        upstream=f"{_SOURCE}/distributed/param_and_grad_buffer.py#L760",
        until="the buffers can be allocated without being filled",
        make=allocate_buffers_unfilled,
    ),
    *megatron_passes.PATCHES,
    *checkpoint_pickles.PATCHES,
    *checkpoint_writes.PATCHES,
)
