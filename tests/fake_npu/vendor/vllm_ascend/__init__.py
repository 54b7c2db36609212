"""Stands for vllm-ascend: a plugin that brings vLLM its platform."""


def register() -> str:
    return "vllm_ascend.platform.NPUPlatform"
