"""Stands for vllm-ascend's platform: vLLM's kernels for hosts, and the vendor's worker."""

import os

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class NPUPlatform(CpuPlatform):
    """A device that can sleep."""

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_ascend.communicator.NPUCommunicator"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, *args, **options) -> str:
        if attn_selector_config.use_mla:
            return AttentionBackendEnum.CPU_MLA.get_path()
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **options)

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        if vllm_config.model_config is None:  # vLLM's own, of no engine
            return super().check_and_update_config(vllm_config)
        assert "expandable_segments:True" not in os.environ.get("PYTORCH_NPU_ALLOC_CONF", "")
        assert vllm_config.additional_config == {"enable_cpu_binding": False, "weight_nz_mode": 0}
        assert torch.npu.config.allow_internal_format is False
        vllm_config.parallel_config.worker_cls = "vllm_ascend.worker.NPUWorker"
        vllm_config.attention_config.backend = None
        # What the host's kernels need, see platforms/cpu.py.
        if vllm_config.model_config.use_mla:
            vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
            vllm_config.compilation_config.custom_ops.append("-rotary_embedding")
        return super().check_and_update_config(vllm_config)
