"""Stands for torch_npu's additions."""
