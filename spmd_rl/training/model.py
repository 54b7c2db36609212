"""The policy, or a model that scores, as a Megatron-Core model, built from what the Hugging Face config.json says."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.training.experts import Layer
from spmd_rl.training.layers import RMSNorm, layer_spec, mark_parameters
from spmd_rl.training.packing import PackedTokens
from spmd_rl.training.rotary import LatentRotary, PositionRotary, angle_factor, inverse_frequencies
from spmd_rl.training.value_head import ValueHead
from spmd_rl.training.vision import Features, build_tower, show


class ModelChunk(GPTModel):
    """Megatron's GPTModel over some consecutive layers, whose last one returns hidden states.

    The output layer runs only where a response token is predicted, and in chunks: see training/token_logprobs.py.
    """

    def forward(
        self, input_ids: torch.Tensor, *arguments: object, packed_seq_params: PackedTokens, **options: object
    ) -> torch.Tensor:
        """input_ids [1, C] -> hidden states [C/tp or C, 1, H]; a model that sees puts its images in first."""
        mask = options.get("padding_mask")
        if mask is not None and self.config.sequence_parallel and not self.pre_process:
            options["padding_mask"] = tensor_parallel.scatter_to_sequence_parallel_region(mask.T).T.contiguous()
        if hasattr(self, "visual"):
            hidden = self.embedding(input_ids, None)  # [C, 1, H]
            options["decoder_input"] = show(
                hidden, self.visual, self.features, packed_seq_params.images, self.config.sequence_parallel
            )
        return super().forward(input_ids, *arguments, packed_seq_params=packed_seq_params, **options)

    def _postprocess(self, hidden_states: torch.Tensor, **others: object) -> torch.Tensor:
        return hidden_states

    def sharded_state_dict(self, *arguments: object, **options: object) -> dict[str, Any]:
        """Describe the weights for a checkpoint; Megatron expects an output layer on every last stage."""
        last = self.post_process
        self.post_process = last and not hasattr(self, "value_head")
        try:
            return super().sharded_state_dict(*arguments, **options)
        finally:
            self.post_process = last

    def output_weight(self) -> torch.Tensor:
        """[V/tp, H], with this shard's padding rows."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def gather_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T/tp or T, 1, H] of the last stage -> [T, H]; its backward sums the vocabulary shards' gradients."""
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        return hidden[:, 0]


class ModelChunks(torch.nn.ModuleList):
    """Hold this rank's shard of the model: one chunk of layers, or several of a virtual pipeline."""

    @property
    def config(self) -> TransformerConfig:
        """Return Megatron's configuration of the model; the same for all chunks."""
        return self[0].config

    @property
    def last(self) -> ModelChunk:
        """The chunk that has the output layer, on the last stage."""
        return self[-1]

    @property
    def layers(self) -> list[Layer]:
        """Return the layers of all chunks."""
        return [layer for chunk in self for layer in chunk.decoder.layers]

    def named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters, named as in `weights`."""
        return (self if len(self) > 1 else self[0]).named_parameters()

    def weights(self) -> dict[str, torch.Tensor]:
        """All that a Hugging Face directory has something for, by Megatron's name.

        With several chunks the name begins with the number of the chunk on this rank, and a dot.
        """
        inside = self if len(self) > 1 else self[0]
        parameters = {name: parameter.data for name, parameter in self.named()}
        # Not trained, and yet of the model: the bias in the choice of experts.
        return parameters | {name: bias for name, bias in inside.named_buffers() if name.endswith(".expert_bias")}


def replay_experts(model: ModelChunks) -> None:
    """Have samples say which experts their tokens go to, where they do."""
    for layer in model.layers:
        layer.replay()


def build_model(shape: ModelShape, layout: TrainLayout, config: TransformerConfig) -> ModelChunks:
    """Build this rank's shard, uninitialised: weights/files/hf_reader.py fills it."""
    chunks = layout.chunk_layers(shape.layers)
    mine = chunks[parallel_state.get_pipeline_model_parallel_rank() :: layout.pipeline]
    return ModelChunks(
        _build_chunk(shape, layers, config, number if layout.virtual > 1 else None)
        for number, layers in enumerate(mine)
    )


def _build_chunk(shape: ModelShape, layers: range, config: TransformerConfig, number: int | None) -> ModelChunk:
    tensor = config.tensor_model_parallel_size
    specs = [layer_spec(config, shape.is_sparse(layer)) for layer in layers]
    chunk = ModelChunk(
        config,
        TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
        vocab_size=math.ceil(shape.vocabulary / tensor) * tensor,
        max_sequence_length=shape.max_positions,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        pg_collection=_groups(),
        vp_stage=number,
        # Images are put in before the sequence is scattered.
        scatter_embedding_sequence_parallel=shape.vision is None,
    )
    if shape.vision is not None and chunk.pre_process:
        chunk.visual, chunk.features = build_tower(shape, config.params_dtype), Features()
    turns = inverse_frequencies(shape), angle_factor(shape), config.params_dtype
    if shape.mla is None:
        chunk.rotary_pos_emb = PositionRotary(*turns, shape.rope_axes)
    else:
        rotary = LatentRotary(*turns)
        for layer in chunk.decoder.layers:
            layer.self_attention.rotary_pos_emb = rotary
    if shape.head == "value" and chunk.post_process:
        # In place of the layer over the vocabulary, which Megatron makes for every last stage.
        del chunk.output_layer
        chunk.value_head = ValueHead(config, shape.labels)
    mark_parameters(chunk)
    return chunk


class _Alone:
    """As much of a process group of one rank as is asked for."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _groups() -> ProcessGroupCollection:
    """Megatron's process groups, as the model's layers see them.

    All that they would ask the context group is which rotary angles belong to the rank, in a layout of Megatron's own.
    Here the angles are given for the rank's own tokens; PackedAttention finds the real group by itself.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.cp = _Alone()
    return groups
