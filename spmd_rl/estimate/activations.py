"""Count what a micro-batch's forward and backward pass takes of a rank's memory beside weights and gradients.

The terms are those tensors that autograd keeps of Megatron's layers as they are built here (training/layers.py); the
estimate grows with tokens and ignores what does not, such as indices.
"""

from dataclasses import dataclass

from spmd_rl.config.config import Config
from spmd_rl.config.engine_cache import BYTES
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.estimate.micro_batch import MicroBatch
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms.kernels import Kernels

_FLOAT = 4


@dataclass(frozen=True)
class Passes:
    """Hold the bytes of a rank's passes at their peak, activations and logits apart."""

    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Return both together."""
        return self.activations + self.logits


@dataclass(frozen=True)
class Activations:
    """Count the activations of a model in a layout, of one micro-batch."""

    config: Config
    shape: ModelShape
    layout: TrainLayout
    kernels: Kernels
    batch: MicroBatch

    @property
    def _tokens(self) -> float:
        """Tokens of this rank's chunk."""
        return self.batch.tokens / self.layout.context

    @property
    def _rows(self) -> float:
        """Tokens of which this rank has norms and residuals."""
        return self._tokens / (self.layout.tensor if self.config.parallel.sequence else 1)

    @property
    def _size(self) -> int:
        return BYTES[self.config.model.dtype]

    def layer(self, number: int, inner: bool = True) -> float:
        """Return what a layer keeps; `inner`: also what is inside its attention."""
        shape, norms = self.shape, self.kernels.norm_copies
        # Two norms; the sum of the residual behind the attention, and that behind the feed-forward block.
        around = self._rows * shape.hidden * (2 * norms + 2)
        block = self._experts() if shape.is_sparse(number) else self._gated(self._tokens, shape.ffn)
        return self._size * (around + self._attention(inner) + block) + _FLOAT * self._routing(number)

    def _gated(self, tokens: float, channels: int) -> float:
        """Elements of a gated block: gate and up, and what they make together."""
        return tokens * channels * 3 / self.layout.tensor

    def _experts(self) -> float:
        """Elements of a layer of experts, each with its part of the tokens."""
        experts = self.shape.experts
        assert experts is not None
        # Each rank computes as many rows as it sends: of the tokens that it has, at each of their experts.
        rows = self._rows * experts.per_token
        # The rows as the experts get them; gate and up, and what they make with the router's weight.
        routed = rows * (self.shape.hidden + experts.ffn * (3 + self.kernels.weighed_copies))
        return routed + self._gated(self._tokens, experts.shared_ffn)

    def _routing(self, number: int) -> float:
        """Numbers of fp32 that the router keeps: logits, scores and the map, each over all experts."""
        experts = self.shape.experts if self.shape.is_sparse(number) else None
        return 3 * self._rows * experts.count if experts else 0.0

    def _attention(self, inner: bool) -> float:
        """Elements that attention keeps; its heads are cut over the tensor ranks."""
        shape, tokens, tensor, norms = self.shape, self._tokens, self.layout.tensor, self.kernels.norm_copies
        head = shape.head_dim
        query = shape.heads * head / tensor
        if shape.mla is not None:
            mla, key = shape.mla, query
            down = (mla.q_rank * (1 + norms) + mla.kv_rank * (1 + norms) + mla.rope_dim) * self._rows
            out = tokens * shape.heads * mla.v_dim / tensor
            # Query, key, and the value padded to their width; the result without the padding.
            kept = down + tokens * (2 * query + 4 * mla.rope_dim) + out
            if inner:
                kept += tokens * query + self._inner(query, key)
            return kept
        key = shape.kv_heads * head / tensor
        normed = (query * norms + key * (norms - 1)) if shape.qk_norm else 0.0
        # What the projection gives, query and key with positions, their cosines and sines, and the result.
        kept = tokens * (query + 2 * key + normed + query + key + 4 * head + query)
        return kept + (self._inner(query, key) if inner else 0.0)

    def _inner(self, query: float, key: float) -> float:
        """Elements inside the attention of one layer; `query`, `key`: channels of a token."""
        batch, context = self.batch, self.layout.context
        prompt, after = batch.lengths.prompt, max(0.0, batch.lengths.response - 1)
        if not batch.shared or batch.samples < 2:
            return 0.0 if self.kernels.one_call else batch.tokens / context * query
        responses = batch.prompts * batch.samples
        seen = (batch.prompts * prompt + responses * (prompt + after)) * 2 * key
        if self.kernels.one_call:
            return seen / context
        padded = responses * (2 * after * query + (prompt + after) * 2 * key) + batch.prompts * prompt * query
        mask = batch.prompts * after * (prompt + after)
        return padded / context + mask

    def passing(self, number: int, again: bool = False) -> float:
        """Return what a layer's backward pass takes for a while: the gradients of its widest block.

        `again`: of a layer alone, whose activations go as the gradients come.
        """
        shape, experts = self.shape, self.shape.experts
        if shape.is_sparse(number) and experts is not None:
            wide = self._rows * experts.per_token * (2 * experts.ffn + shape.hidden)
        else:
            wide = self._tokens * (1 if again else 4) * shape.ffn / self.layout.tensor
        return self._size * (wide + 2 * self._rows * shape.hidden)

    def head(self, gradient: bool) -> float:
        """Return what the layer over the vocabulary takes: the logits of a chunk, in fp32, and twice."""
        shape, tensor = self.shape, self.layout.tensor
        rows = min(self.config.train.logprob_chunk_tokens, self.batch.loss_tokens / self.layout.context)
        columns = shape.vocabulary / tensor
        forward = rows * columns * 2 * _FLOAT
        if not gradient:
            return forward
        slope = _FLOAT if self.config.algorithm.entropy_coefficient else 0
        half = self._size if self._size < _FLOAT else 0
        # In float32 the weight's gradient is added where it belongs; a half-precision product is made beside it first.
        product = columns * shape.hidden * _FLOAT if half else 0
        return max(forward, rows * columns * (_FLOAT + slope + half) + product)

    def _last_rows(self) -> float:
        """Elements that the last stage keeps behind its layers: the last norm, and the rows that predict."""
        predict = self.batch.loss_tokens / self.layout.context
        gathered = self._tokens if self.config.parallel.sequence and self.layout.tensor > 1 else 0.0
        return self.shape.hidden * (self._rows * self.kernels.norm_copies + predict + gathered)

    def learning(self, stage: int, microbatches: int) -> Passes:
        """Return the peak of a forward and backward pass on a pipeline stage."""
        layout, train, size = self.layout, self.config.train, self._size
        chunks = layout.chunk_layers(self.shape.layers)[stage :: layout.pipeline]
        mine = [number for layers in chunks for number in layers]
        rows = self._rows * self.shape.hidden * size
        again = set(mine[: train.recompute_layers] if train.recompute_layers else mine)
        again = again if train.recomputes == "full" else set()
        inner = train.recomputes != "selective"
        kept = sum(rows if number in again else self.layer(number, inner) for number in mine)
        # One of those that are computed again is there in full, or the inside of one attention.
        once = max((self.layer(number) for number in again), default=0.0)
        if not inner:
            once = max(self.layer(number) - self.layer(number, False) for number in mine)
        first, last = stage == 0, stage == layout.pipeline - 1
        kept += rows if first else rows * len(chunks)
        behind = size * self._last_rows() if last else 0.0
        flight = self._in_flight(stage, microbatches)
        head = self.head(True) if last and self.shape.head == "lm" else 0.0
        layers = once + max(self.passing(number, number in again) for number in mine)
        held = self.kernels.heap * (flight * kept + behind)
        # While the head works on the last micro-batch the layers wait, and the other way round.
        return Passes(int(held), int(head)) if head > layers else Passes(int(held + self.kernels.heap * layers), 0)

    def _in_flight(self, stage: int, microbatches: int) -> float:
        """Micro-batches whose activations a stage holds at once, in the schedule that alternates the passes."""
        layout = self.layout
        if layout.virtual == 1:
            return min(microbatches, layout.pipeline - stage)
        chunks = 2 * (layout.pipeline - stage - 1) + (layout.virtual - 1) * layout.pipeline + 1
        return min(microbatches * layout.virtual, chunks) / layout.virtual

    def scoring(self, stage: int) -> Passes:
        """Return the peak of a pass without gradients: one layer, or the head, at a time."""
        chunks = self.layout.chunk_layers(self.shape.layers)[stage :: self.layout.pipeline]
        rows = self._rows * self.shape.hidden * self._size
        heap, last = self.kernels.heap, stage == self.layout.pipeline - 1 and self.shape.head == "lm"
        layers = heap * (2 * rows + max(self.layer(number) for some in chunks for number in some) / 2)
        behind = heap * (2 * rows + self._size * self._last_rows())
        head = self.head(False) if last else 0.0
        return Passes(int(behind), int(head)) if last and behind + head > layers else Passes(int(layers), 0)
