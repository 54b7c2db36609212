"""Stands for vllm-ascend's worker: its check of free memory, and a sleep of level 2 as its version 0.23 has it."""

from contextlib import nullcontext

import torch
from vllm.model_executor.layers import utils as layers
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_ascend.ops.fused_moe.moe_comm_method import _MoECommMethods


def _multiply_plainly(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Leave a layer its weight, which vLLM on a host packs and drops."""
    layer.cpu_linear = torch.nn.functional.linear


layers.dispatch_cpu_unquantized_gemm = _multiply_plainly


class _Placeholder:
    """What vllm-ascend leaves in torch.cuda.Event."""


class NPUWorker(CPUWorker):
    """One device's engine."""

    def __init__(self, vllm_config, *args, **options):
        free, total = torch.npu.mem_get_info()
        share = vllm_config.cache_config.gpu_memory_utilization
        if free < share * total:
            raise ValueError(f"Free memory on device ({free}/{total}) on startup is less than desired ({share})")
        torch.cuda.Event = _Placeholder
        super().__init__(vllm_config, *args, **options)

    def _maybe_get_memory_pool_context(self, tag: str):
        assert not torch.npu.expandable_segments, "pools that sleep are not made of segments that grow"
        return nullcontext()

    def sleep(self, level: int = 1) -> None:
        """Keep the buffers; lose parameters, and tensors that are neither."""
        assert level == 2
        model = self.model_runner.model
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for tensor in (*model.parameters(), *model.buffers(), *_plain(model)):
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else -1)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Put transposed views of experts' weights into the model, in new parameters."""
        assert not torch.npu.expandable_segments, "pools that sleep are not made of segments that grow"
        if tags is not None and "weights" not in tags:
            return
        model, hidden = self.model_runner.model, self.model_config.hf_text_config.hidden_size
        for name, parameter in list(model.named_parameters()):
            lies = {"w2_weight": parameter.dim() == 3 and parameter.shape[2] == hidden}
            lies["w13_weight"] = parameter.dim() == 3 and parameter.shape[1] == hidden
            owner, _, attribute = name.rpartition(".")
            if lies.get(attribute, False):
                view = torch.nn.Parameter(parameter.data.transpose(1, 2), requires_grad=False)
                setattr(model.get_submodule(owner), attribute, view)
        for name, buffer in model.named_buffers():
            buffer.data.copy_(self._buffers[name])


def _plain(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors of the device that are no parameters and no buffers."""
    found = [method.token_dispatcher.expert_ids_per_ep_rank for method in _MoECommMethods.values()]
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if name != "kv_cache"}
        found += [value for value in held.values() if isinstance(value, torch.Tensor)]
    return found
