"""An in-process vLLM engine of this rank: it never reads a weight from disk, and sleeps while the trainer works."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from spmd_rl.patches.vllm import PackedLinear
from spmd_rl.platforms.platform import Platform
from spmd_rl.rollout.requests import Completion, Request, Sampling


class Engine:
    """One rank's part of a vLLM replica; the ranks of a replica make the same calls in the same order."""

    def __init__(
        self,
        model_path: str,
        dtype: str,
        tensor: int,
        max_tokens: int,
        max_sequences: int,
        cache_bytes: int,
        block_tokens: int,
        needs_text: bool,
        seed: int,
        platform: Platform,
        trust_remote_code: bool = False,
    ):
        """`max_tokens`: the longest prompt with its response. `needs_text`: stop strings make the engine detokenize."""
        from vllm import LLM

        self.platform = platform
        options = dict(platform.engine_options)
        if platform.name == "cpu":
            options["block_size"] = block_tokens
        self.llm = LLM(
            model_path,
            dtype=dtype,
            tensor_parallel_size=tensor,
            distributed_executor_backend="external_launcher",
            # The first refresh writes the weights: they are not read from disk a second time.
            load_format="dummy",
            max_model_len=max_tokens,
            max_num_seqs=max_sequences,
            max_num_batched_tokens=max(2048, max_tokens),
            kv_cache_memory_bytes=cache_bytes,
            enable_prefix_caching=True,
            # Log-probabilities of the distribution that was sampled from, not of the raw logits.
            logprobs_mode="processed_logprobs",
            skip_tokenizer_init=not needs_text,
            # Every rank of a replica must agree on what it would sample without request seeds too.
            seed=seed,
            disable_log_stats=True,
            trust_remote_code=trust_remote_code,
            **options,
        )
        self.needs_text = needs_text
        self.asleep = False
        self._storage_bytes: dict[int, int] = {}
        platform.after_engine_start()

    @property
    def _runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def parameters(self) -> dict[str, torch.Tensor]:
        """The engine's own parameters by their vLLM names; writing into them is the refresh."""
        return {name: parameter.data for name, parameter in self._runner.get_model().named_parameters()}

    def _cache(self) -> list[torch.Tensor]:
        caches = {cache.untyped_storage().data_ptr(): cache for cache in _tensors(self._runner.kv_caches)}
        return list(caches.values())

    def sleep(self) -> None:
        """Give the memory of weights and cache back; both are lost."""
        if self.asleep:
            return
        self.asleep = True
        if self.platform.engine_sleeps:
            self.llm.sleep(level=2)
            return
        for _, linear in self._packed_layers():
            linear.unpack()
        self._weights = list(self.parameters().values())
        self._caches = self._cache()
        self._release(self._weights)
        self._release(self._caches)

    def wake_weights(self) -> None:
        """Make room for the weights; a refresh must write all of them before anything is generated."""
        if not self.asleep:
            return
        if self.platform.engine_sleeps:
            self.llm.wake_up(tags=["weights"])
        else:
            self._restore(self._weights)

    def weights_written(self) -> None:
        """The refresh is complete and proved: on a CPU, pack the weights for its kernels, one layer at a time."""
        for layer, linear in self._packed_layers():
            if linear.pack(layer.weight) and not linear.keeps_weight:
                self._release([layer.weight])

    def _packed_layers(self) -> list[tuple[torch.nn.Module, PackedLinear]]:
        layers = ((layer, getattr(layer, "cpu_linear", None)) for layer in self._runner.get_model().modules())
        return [(layer, linear) for layer, linear in layers if isinstance(linear, PackedLinear)]

    def wake_cache(self) -> None:
        """Make room for the cache, which is empty: what it held was computed with other weights."""
        if self.asleep:
            if self.platform.engine_sleeps:
                self.llm.wake_up(tags=["kv_cache"])
            else:
                self._restore(self._caches)
            self.asleep = False
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        """End the engine, and with it the process groups: vLLM destroys all of the process's, not only its own."""
        self.llm.llm_engine.engine_core.shutdown()

    def _release(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._storage_bytes[storage._cdata] = storage.nbytes()
                storage.resize_(0)

    def _restore(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                storage.resize_(self._storage_bytes[storage._cdata])

    def generate(self, requests: Iterable[Request], sampling: Sampling, finished: Callable[[Completion], None]) -> None:
        """Run all requests through the engine's step loop; `finished` is called for each sample as it ends."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        waiting: dict[str, Request] = {}
        for request in requests:
            name = str(request.id)
            waiting[name] = request
            engine.add_request(
                name,
                TokensPrompt(prompt_token_ids=list(request.prompt)),
                SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    min_p=sampling.min_p,
                    max_tokens=sampling.max_tokens,
                    stop=list(sampling.stop) or None,
                    stop_token_ids=list(sampling.stop_token_ids) or None,
                    seed=request.seed,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=self.needs_text,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                ),
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished(_completion(waiting.pop(output.request_id), output))
        assert not waiting, f"the engine lost {len(waiting)} requests"


def _completion(request: Request, output: Any) -> Completion:
    sample = output.outputs[0]
    tokens = torch.tensor(list(sample.token_ids), dtype=torch.int64)
    flat = sample.logprobs
    # One entry a position: the sampled token's.
    logprobs = torch.tensor([flat.logprobs[start] for start in flat.start_indices], dtype=torch.float32)
    assert len(logprobs) == len(tokens)
    return Completion(
        id=request.id,
        prompt=torch.tensor(request.prompt, dtype=torch.int64),
        response=tokens,
        logprobs=logprobs,
        finish_reason=str(sample.finish_reason),
        cached_prompt_tokens=output.num_cached_tokens or 0,
    )


def _tensors(caches: Any) -> list[torch.Tensor]:
    """The tensors of vLLM's cache list, which nests where layers hold several."""
    if isinstance(caches, torch.Tensor):
        return [caches]
    return [tensor for cache in caches for tensor in _tensors(cache)]
