"""One rank of tests/spmd/test_whole.py: the whole stack of a rank, told by rank 0 as the loop tells it."""

import hashlib
from dataclasses import asdict, replace

from spmd.ranks import arguments, end_megatron, join, ready, report


def refresh_with_one_wrong_element(worker, rank: int, parameter: str, element: int) -> str:
    """Return what a refresh raises when an element of one rank's engine changes after it was written."""

    def changed(name, tensor):
        if worker.world.rank == rank and name == parameter:
            tensor.view(-1)[element] += 1e-4

    worker.device_switch.on_written = changed
    worker.device_switch.refreshes = 0  # the next one is checked to the last element
    try:
        worker.device_switch.to_rollout()
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


def main() -> None:

    platform = ready("megatron_core", "vllm")
    from vllm.distributed import parallel_state as groups_of_vllm
    from vllm.triton_utils import dispatcher

    # The process groups outlive each engine here, for the next one.
    groups_of_vllm.destroy_distributed_environment = lambda: None
    world = join(platform)
    found = []
    for case in arguments()["cases"]:
        found.append(_case(case, world, platform))
        end_megatron()
        # The first engine's kernels stay bound.
        dispatcher._rebind_kernels = lambda *arguments, **options: None
    report(world.rank, {"cases": found})


def _responses(worker) -> dict[int, list[int]]:
    """Return the responses of this rank's samples."""
    return {id: made.completion.sample.response.tolist() for id, made in sorted(worker.rollouts.made.items())}


def _case(given: dict, world, platform) -> dict:
    import torch.distributed as dist

    from spmd_rl.config.loading import load_config
    from spmd_rl.config.machine_sizes import with_machine_sizes
    from spmd_rl.controller.planner import plan_microbatches
    from spmd_rl.controller.ranks import Ranks
    from spmd_rl.data.answers import ANSWERS
    from spmd_rl.data.sampling_params import SamplingParams
    from spmd_rl.distributed.commands import ControlChannel
    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.runtime.startup import read_inputs, start_graders
    from spmd_rl.worker.train_worker import TrainWorker

    config = with_machine_sizes(load_config(given["config"]))
    loaded = read_inputs(config)
    shape = read_model_shape(config.model.path)
    worker = TrainWorker(
        config,
        shape,
        platform,
        world,
        loaded.prompts,
        loaded.tokenizer,
        start_graders(config, loaded.prompts["train"][0], loaded.tokenizer),
    )
    commands = ControlChannel(world, 300, protocol=ANSWERS)
    found: dict = {"rounds": []}
    if world.rank:
        worker.serve(commands)
    else:
        ranks = Ranks(commands, worker)
        rows = list(range(config.train.prompts_per_step))
        count, sampling = config.algorithm.samples_per_prompt, SamplingParams.of(config.rollout)
        for step in range(given["rounds"]):
            one: dict = {}
            one["moved"] = ranks.to_rollout(canary=True)
            samples, _ = ranks.generate("train", rows, step, count, sampling)
            one["tokens"] = _responses(worker)
            one["canary"] = ranks.to_training()
            ranks.rewards()
            one["tickets"] = [asdict(sample) for sample in samples]
            texts = ranks.conversations([sample.id for sample in samples], step)
            one["responses"] = [text["response"] for text in texts]
            plan = plan_microbatches(
                samples,
                config.parallel.data(world.size),
                config.train.minibatches,
                config.train.tokens_per_microbatch,
                True,
            )
            ranks.exchange(plan)
            total = sum(sample.response_tokens for sample in samples)
            minibatch = plan.minibatches[0]
            ranks.put("advantages", {i: (-1.0) ** i for i in minibatch.ids})
            ranks.put("weights", dict.fromkeys(minibatch.ids, 1.0 / total))
            one["learned"], _ = ranks.learn("policy", 0, config.train.learning_rate)
            ranks.forget()
            found["rounds"].append(one)
        ranks.export_hf(given["export"])
        ranks.to_rollout()
        greedy, _ = ranks.generate("eval", list(range(4)), 0, 1, replace(sampling, temperature=0.0))
        found["greedy"] = {
            sample: made.completion.sample.response.tolist() for sample, made in sorted(worker.rollouts.made.items())
        }
        found["prompts"] = {i: list(loaded.prompts["eval"][i].token_ids) for i in range(4)}
        ranks.to_training()
        ranks.rewards()
        ranks.stop()
    if given["flip"]:
        found["flipped"] = refresh_with_one_wrong_element(worker, *given["flip"])
    weights = worker.engine.weights
    found["engine"] = {name: list(weights.plain(name).shape) for name in weights}
    found["shard"] = {name: list(shape) for name, shape in worker.device_switch.destination.params.items()}
    found["weights"] = hashlib.sha256(
        b"".join(tensor.numpy().tobytes() for _, tensor in sorted(worker.models["policy"].weights().items()))
    ).hexdigest()
    # A rank that closes its engine while another is still in one of their calls would end it with an error.
    dist.barrier(group=world.control)
    worker.close()
    return found
