"""Megatron's distributed optimizer: gradients summed, clipped, applied."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from spmd_rl.config.config import TrainConfig
from spmd_rl.config.critic_config import CriticConfig
from spmd_rl.platforms import current
from spmd_rl.training.model import ModelChunks
from spmd_rl.training.offload import gradient_buffers
from spmd_rl.training.optimizer_parts import Part, parts_of

OptimizerSettings = TrainConfig | CriticConfig
"""They call what an optimizer needs alike."""


def wrap_for_gradients(model: ModelChunks) -> list[DistributedDataParallel]:
    """Lay Megatron's buffers around a model's chunks: of weights that are not loaded yet, and of gradients.

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
        self.waits = False
        """True where the state is on the host but while it is computed with."""
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
        model = {weight.untyped_storage()._cdata for chunk in wrapped for weight in chunk.parameters()}
        self.parts = [part for inner in self.distributed for part in parts_of(inner, model)]

    @property
    def distributed(self) -> list[DistributedOptimizer]:
        """Megatron's optimizers in this one: of the experts' parameters and of all others."""
        return [inner for inner in self.optimizer.chained_optimizers if inner.optimizer is not None]

    def take_weights(self) -> None:
        """The model's weights were set from outside: the optimizer's own float32 copies become equal to them."""
        for part in self.each():
            part.take_weights()

    def zero_gradients(self) -> None:
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, learning_rate: float, bound: float = math.inf, sound: bool = True) -> tuple[bool, float]:
        """One update at this learning rate. Returns whether it was made, and the gradient's norm before it was clipped.

        Where that norm is not finite or above `bound`, or a rank is not `sound` or has a gradient that is not finite,
        weights and moments stay as they were, on all ranks alike.
        """
        ready, norm = self._ready(learning_rate, bound, sound)
        if ready:
            for part in self.each():
                part.step()
            for chunk in self.wrapped:
                chunk.start_param_sync()
        return ready, norm

    def _ready(self, learning_rate: float, bound: float, sound: bool) -> tuple[bool, float]:
        """Look at the gradients, and clip them where there is to be an update.

        Megatron's own step looks whether they are finite only where it scales the loss, for float16; else it writes the
        nan into the weights.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_mult", 1.0)
            # A checkpoint says this too, of the machine that wrote it.
            group["fused"], group["foreach"] = current().fused_adamw, None
        self._count_on_device()
        found_inf = self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if found_inf or not math.isfinite(norm) or norm > bound or not self._all_sound(sound):
            return False, norm
        for inner in self.distributed:
            parameters = inner.get_parameters()
            if self.clip_grad > 0.0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self.clip_grad, total_norm=norm)
        return True, norm

    def _all_sound(self, sound: bool) -> bool:
        """Return, alike on all ranks, whether each of them is sound, down to the gradients that no norm counts.

        Norms and value heads are whole on every tensor rank; the first one's gradients are counted.
        """
        largest = [
            parameter.grad.abs().amax()
            for inner in self.distributed
            for parameter in inner.get_parameters()
            if parameter.grad is not None and parameter.grad.numel()
            if not param_is_not_tensor_parallel_duplicate(parameter, getattr(inner, "tp_group", None))
            or not param_is_not_shared(parameter)
        ]
        device = next(self.wrapped[0].parameters()).device
        own = torch.tensor([0.0 if sound else math.nan], dtype=torch.float32, device=device)
        for one in largest:
            own += one.to(device) * 0  # nan where it is not finite
        dist.all_reduce(own)
        return math.isfinite(float(own))

    def _count_on_device(self) -> None:
        """Have the counts of steps where the kernel reads them: another machine's checkpoint has them on the host."""
        if not current().fused_adamw:
            return
        for inner in self.distributed:
            for parameter, state in inner.optimizer.state.items():
                if "step" in state:
                    state["step"] = state["step"].to(parameter.device, torch.float32)

    def each(self, of: DistributedOptimizer | None = None) -> Iterator[Part]:
        """Yield the parts of the state, each while it is on the device: the only one where they wait on the host.

        `of`: only those of one of Megatron's optimizers.
        """
        for part in self.parts:
            if of not in (None, part.inner):
                continue
            part.onload()
            try:
                yield part
            finally:
                if self.waits:
                    part.offload()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank's part of the optimizer remembers, by its name, each while it is on the device."""
        for part in self.each():
            yield from part.tensors()

    def offload(self) -> None:
        """Move the optimizer's state to the host, where it waits between steps from now on."""
        self.waits = current().offloads
        for part in self.parts:
            part.offload()

    def begin_state(self) -> None:
        """Have a state to save where no step was made yet: a critic learned alone, or all updates were skipped."""
        if not all(inner.optimizer.state for inner in self.distributed):
            for part in self.each():
                part.begin_state()

    def load(self, state: dict[str, object]) -> None:
        """Take what Megatron loaded from a checkpoint, in the form of its own load_state_dict."""
        found = dict[torch.Tensor, dict[str, torch.Tensor]]()
        for inner in self.distributed:
            inner._set_main_param_and_optimizer_states = found.__setitem__
        try:
            self.optimizer.load_state_dict(state)
        finally:
            for inner in self.distributed:
                del inner._set_main_param_and_optimizer_states
        for part in self.each():
            part.fill(found)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have all of the optimizer's state on the device inside."""
        waits, self.waits = self.waits, False
        for part in self.parts:
            part.onload()
        yield
        if waits:
            self.offload()
