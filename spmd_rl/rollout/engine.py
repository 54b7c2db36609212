"""An in-process vLLM engine of this rank: it never reads a weight from disk, and sleeps while the trainer works."""

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from spmd_rl.distributed.layout import RolloutLayout
from spmd_rl.distributed.sample import Sample
from spmd_rl.distributed.status import set_status
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.patches.unused_imports import server, standing_in
from spmd_rl.platforms.platform import Platform
from spmd_rl.rollout.engine_weights import SleepMode, Weights
from spmd_rl.rollout.expert_capture import ExpertCapture
from spmd_rl.rollout.images import ImageFeatures, image_options, with_images
from spmd_rl.rollout.options import memory_of_engine, model_options
from spmd_rl.rollout.packed_weights import OwnStorages
from spmd_rl.rollout.requests import Completion, Request, SamplingParams


def import_vllm() -> None:
    """Import vLLM, and look no more for garbage among what is imported now: it does five times while it starts."""
    with standing_in(server()):
        from vllm import LLM  # noqa: F401

    gc.freeze()


class Engine:
    """One rank's part of a group of vLLM replicas; the ranks of a group make the same calls in the same order."""

    opened: ClassVar["weakref.ref[Engine] | None"] = None
    """The one of this process, until it is closed."""

    def __init__(  # noqa: PLR0913 (what vLLM is told, by name)
        self,
        model_path: str,
        shape: ModelShape,
        dtype: str,
        layout: RolloutLayout,
        max_tokens: int,
        max_sequences: int,
        cache_bytes: int,
        block_tokens: int,
        needs_text: bool,
        seed: int,
        platform: Platform,
        trust_remote_code: bool = False,
        end_ids: Sequence[int] = (),
        skip_special_tokens: bool = False,
        weight_bytes: int = 0,
        images_per_prompt: int = 1,
        switches: Mapping[str, object] = {"enable_prefix_caching": True},
        replay: bool = False,
    ):
        """`max_tokens`: the longest prompt with its response. `needs_text`: stop strings make the engine detokenize,
        with `skip_special_tokens` or without. `end_ids`: end every response. `weight_bytes`: this rank's.
        `switches`: more options of `vllm.LLM` (options.switches), which win. `replay`: samples say which experts each
        of their tokens was sent to.

        Raises ValueError where vLLM cannot run such a model on this machine, or this process has an engine.
        """
        if Engine.opened is not None and Engine.opened() is not None:
            met = "this process has one already, and vLLM's process groups and its memory that sleeps are made for one"
            way = "close() it first, or start the other run in a process of its own (spmd_rl.runs does)"
            raise ConfigError(Problem("Engine", None, met, way))
        options = model_options(model_path, shape, block_tokens, platform)
        if platform.free_and_total_bytes is not None:
            share, _ = memory_of_engine(*platform.free_and_total_bytes(), weight_bytes, cache_bytes)
            options |= {"gpu_memory_utilization": share}
        options |= {"max_num_batched_tokens": max(2048, max_tokens), **image_options(shape, images_per_prompt)}
        options |= switches
        if replay and platform.engine_returns_experts:
            options["enable_return_routed_experts"] = True
        from vllm import LLM

        self.llm = LLM(
            model_path,
            dtype=dtype,
            tensor_parallel_size=layout.tensor,
            data_parallel_size=layout.data,
            enable_expert_parallel=layout.expert,
            distributed_executor_backend="external_launcher",
            # The first refresh writes the weights: they are not read from disk a second time.
            load_format="dummy",
            max_model_len=max_tokens,
            max_num_seqs=max_sequences,
            kv_cache_memory_bytes=cache_bytes,
            # Log-probabilities of the distribution that was sampled from, not of the raw logits.
            logprobs_mode="processed_logprobs",
            # What reads images does not start without a tokenizer.
            skip_tokenizer_init=not needs_text and shape.vision is None,
            # Every rank of a replica must agree on what it would sample without request seeds too.
            seed=seed,
            disable_log_stats=True,
            trust_remote_code=trust_remote_code,
            **options,
        )
        self.needs_text, self.skip_special_tokens, self.end_ids = needs_text, skip_special_tokens, tuple(end_ids)
        self.asleep = False
        runner = self._runner
        self.features = None if shape.vision is None else ImageFeatures(runner.get_model())
        self.memory = (SleepMode if platform.engine_sleeps else OwnStorages)(self.llm, runner)
        self.weights: Weights = self.memory.weights
        self._replay = replay
        self._capture: ExpertCapture | None = None
        if replay and not platform.engine_returns_experts:
            self._capture = ExpertCapture(runner, shape.layers, self._block_tokens)
        platform.after_engine_start()
        Engine.opened = weakref.ref(self)

    @property
    def _block_tokens(self) -> int:
        return int(self.llm.llm_engine.vllm_config.cache_config.block_size)

    @property
    def _runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def sleep(self) -> None:
        """Give the memory of weights and cache back; both are lost."""
        if self.asleep:
            return
        self.asleep = True
        self.memory.sleep()

    def wake_weights(self) -> None:
        """Begin a refresh: it writes all of `weights` before anything is generated."""
        if self.asleep:
            self.memory.wake_weights()
        self.weights.begin()

    def wake_cache(self) -> None:
        """Make room for the cache, which is empty: what it held was computed with other weights."""
        if self.asleep:
            self.memory.wake_cache()
            self.asleep = False
        self.llm.reset_prefix_cache()
        if self._capture is not None:
            self._capture.forget_cache()
        if self.features is not None:
            self.llm.llm_engine.reset_encoder_cache()

    def close(self) -> None:
        """End the engine, and with it the process groups: vLLM destroys all of the process's, not only its own."""
        from vllm.distributed.parallel_state import get_tp_group

        Engine.opened = None
        queue = get_tp_group().mq_broadcaster
        # It looks twice for garbage among all objects of a process that is about to end, for a second each.
        collect, gc.collect = gc.collect, lambda *_: 0
        try:
            self.llm.llm_engine.engine_core.shutdown()
        finally:
            gc.collect = collect
        # Tensor-parallel ranks talk through sockets that are files in TMPDIR; neither vLLM nor ZeroMQ removes them.
        for address in (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr) if queue is not None else ():
            if address is not None:
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    def generate(
        self, requests: Iterable[Request], sampling: SamplingParams, finished: Callable[[Completion], None]
    ) -> None:
        """Run all requests through the engine's step loop; `finished` is called for each sample as it ends."""
        engine = self.llm.llm_engine
        waiting: dict[str, Request] = {}
        for request in requests:
            waiting[str(request.id)] = request
            if self._capture is not None:
                self._capture.begin(str(request.id), request.prompt, len(request.prompt) + sampling.max_tokens)
            self._add(request, sampling, logprobs=0, flat_logprobs=True, output_kind="FINAL_ONLY")
        count, steps = len(waiting), 0
        while engine.has_unfinished_requests():
            steps += 1
            oldest = next(iter(waiting), "of another engine")
            set_status(doing=f"engine step {steps}, request {oldest}; {count - len(waiting)} of {count} finished")
            for output in engine.step():
                if output.finished:
                    finished(_completion(waiting.pop(output.request_id), output, self._experts_of(output)))
        set_status(doing="")
        assert not waiting, f"the engine lost {len(waiting)} requests"

    def _experts_of(self, output: Any) -> dict[str, torch.Tensor]:
        """Return the field of a finished sample that says its tokens' experts; nothing where none is asked for."""
        if not self._replay:
            return {}
        sample, tokens = output.outputs[0], len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        if self._capture is not None:
            return {"routed_experts": self._capture.end(output.request_id, tokens)}
        assert sample.routed_experts is not None and len(sample.routed_experts) >= tokens
        return {"routed_experts": torch.from_numpy(sample.routed_experts[:tokens].astype("int16"))}

    def stream(self, request: Request, sampling: SamplingParams, made: Callable[[list[int]], bool]) -> str:
        """Run one request; `made` is called after each step with the tokens that are new, and stops it with True.

        The ranks of a replica must say the same. Returns the finish reason: `stop`, `length` or `abort`.
        """
        engine = self.llm.llm_engine
        self._add(request, sampling, output_kind="DELTA")
        reason = ""
        while engine.has_unfinished_requests():
            tokens: list[int] = []
            set_status(doing="engine step of an answer")
            for output in engine.step():
                tokens += output.outputs[0].token_ids
                reason = reason or (str(output.outputs[0].finish_reason) if output.finished else "")
            if made(tokens) and not reason:
                engine.abort_request([str(request.id)])
                reason = "abort"
        set_status(doing="")
        return reason

    def _add(self, request: Request, sampling: SamplingParams, output_kind: str, **more: Any) -> None:
        import vllm
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        prompt, images = list(request.prompt), request.images
        features = self.features.of(images) if self.features and images else None
        self.llm.llm_engine.add_request(
            str(request.id),
            with_images(prompt, images, features) if images else TokensPrompt(prompt_token_ids=prompt),
            vllm.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=sampling.max_tokens,
                stop=list(sampling.stop) or None,
                stop_token_ids=sorted({*sampling.stop_token_ids, *self.end_ids}) or None,
                skip_special_tokens=self.skip_special_tokens,
                spaces_between_special_tokens=False,
                seed=request.seed,
                detokenize=self.needs_text,
                output_kind=RequestOutputKind[output_kind],
                **more,
            ),
        )


def _completion(request: Request, output: Any, experts: Mapping[str, torch.Tensor]) -> Completion:
    sample = output.outputs[0]
    tokens = torch.tensor(list(sample.token_ids), dtype=torch.int32)
    flat = sample.logprobs
    # One entry a position: the sampled token's.
    logprobs = torch.tensor([flat.logprobs[start] for start in flat.start_indices], dtype=torch.float32)
    assert len(logprobs) == len(tokens)
    shown = {**(request.images.fields if request.images else {}), **experts}
    return Completion(
        Sample.of(
            request.id, torch.tensor(request.prompt, dtype=torch.int32), tokens, rollout_logprobs=logprobs, **shown
        ),
        finish_reason=str(sample.finish_reason),
        cached_prompt_tokens=output.num_cached_tokens or 0,
    )
