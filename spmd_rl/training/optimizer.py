"""Megatron's distributed optimizer: gradients summed, clipped, applied."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from spmd_rl.config.config import TrainConfig
from spmd_rl.config.critic_config import CriticConfig
from spmd_rl.platforms import current
from spmd_rl.training.model import ModelChunks
from spmd_rl.training.offload import Offloaded, gradient_buffers

OptimizerSettings = TrainConfig | CriticConfig
"""They call what an optimizer needs alike."""


def wrap_for_gradients(model: ModelChunks) -> list[DistributedDataParallel]:
    """Lay Megatron's gradient buffers around a model's chunks.

    Gradients are summed over the data-parallel ranks, those of experts over the ranks that hold the same experts.
    """
    model.config.finalize_model_grads_func = _sum_gradients
    buffers = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    return [DistributedDataParallel(model.config, buffers, chunk) for chunk in model]


def _sum_gradients(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: object) -> None:
    """Megatron's finalisation without its division by a token count: the losses carry their global denominators."""
    # Afterwards a buffer has what other ranks computed in it.
    model[0].own_totals = [buffer.sum() for buffer in gradient_buffers(model)]
    finalize_model_grads(model, None, **options)


class Optimizer:
    """AdamW whose state is spread over the data-parallel ranks."""

    def __init__(self, wrapped: list[DistributedDataParallel], settings: OptimizerSettings, dtype: torch.dtype):
        self.wrapped = wrapped
        self.clip_grad = settings.clip_grad
        self._offloaded: Offloaded | None = None
        self._waits = False
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.adam_beta1,
                adam_beta2=settings.adam_beta2,
                adam_eps=settings.adam_epsilon,
                clip_grad=settings.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            wrapped,
            use_gloo_process_groups=False,
        )

    @property
    def distributed(self) -> list[Any]:
        """Megatron's optimizers in this one: of the experts' parameters and of all others."""
        return [inner for inner in self.optimizer.chained_optimizers if inner.optimizer is not None]

    def take_weights(self) -> None:
        """The model's weights were set from outside: the optimizer's own float32 copies become equal to them."""
        with self.on_device():
            self.optimizer.reload_model_params()

    def zero_gradients(self) -> None:
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, learning_rate: float, bound: float = math.inf) -> tuple[bool, float]:
        """One update at this learning rate. Returns whether it was made, and the gradient's norm before it was clipped.

        Where that norm is not finite or above `bound`, on all ranks alike, weights and moments stay as they were.
        Megatron's own step looks for the first only where it scales the loss, for float16; else it writes the nan into
        the weights.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_mult", 1.0)
            # A checkpoint says this too, of the machine that wrote it.
            group["fused"], group["foreach"] = current().fused_adamw, None
        self._count_on_device()
        found_inf = self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if found_inf or not math.isfinite(norm) or norm > bound:
            return False, norm
        for inner in self.distributed:
            parameters = inner.get_parameters()
            if self.clip_grad > 0.0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self.clip_grad, total_norm=norm)
        return bool(self.optimizer.step_with_ready_grads()), norm

    def _count_on_device(self) -> None:
        """Have the counts of steps where the kernel reads them: another machine's checkpoint has them on the host."""
        if not current().fused_adamw:
            return
        for inner in self.distributed:
            for parameter, state in inner.optimizer.state.items():
                if "step" in state:
                    state["step"] = state["step"].to(parameter.device, torch.float32)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank's part of the optimizer remembers, by its name."""
        for inner in self.distributed:
            for state in inner.optimizer.state.values():
                yield from ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))
            for group in inner.optimizer.param_groups:
                yield from (("main parameter", parameter) for parameter in group["params"])

    def _state(self) -> Offloaded:
        """Optimizer moments and parameters; the moments come into being with the first step."""
        inner = [
            torch_optimizer
            for chained in self.optimizer.chained_optimizers
            # A stage without experts has nothing for the second of them.
            if (torch_optimizer := chained.optimizer) is not None
        ]
        tensors = [
            value
            for torch_optimizer in inner
            for state in torch_optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        ]
        # In half precision the optimizer has parameters of its own; in fp32 they are the model's, which wait elsewhere.
        model = {weight.untyped_storage()._cdata for chunk in self.wrapped for weight in chunk.parameters()}
        tensors += [
            parameter.data
            for torch_optimizer in inner
            for group in torch_optimizer.param_groups
            for parameter in group["params"]
            if parameter.untyped_storage()._cdata not in model
        ]
        if self._offloaded is None or self._offloaded.count != len(tensors):
            self._offloaded = Offloaded(tensors)
        return self._offloaded

    def offload(self) -> None:
        """Move the optimizer's state to the host, where it waits between steps from now on."""
        self._waits = True
        self._state().offload()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the optimizer's state on the device inside: for a step, and for whoever reads or writes it."""
        waits, self._waits = self._waits, False
        self._state().onload()
        yield
        if waits:
            self.offload()
