"""Stands for vllm-ascend's operators."""
