"""Group Relative Policy Optimization: `torchrun --nproc_per_node 2 -m spmd_rl.grpo --config FILE`."""

from itertools import compress

from spmd_rl.algorithms.curation import group_fractions
from spmd_rl.algorithms.schedule import learning_rate
from spmd_rl.algorithms.table import find_advantage, find_curation, find_reduction
from spmd_rl.config.config import Config
from spmd_rl.controller.checkpoint_manager import CheckpointManager
from spmd_rl.controller.planner import plan_microbatches
from spmd_rl.controller.ranks import Ranks
from spmd_rl.controller.reward_models import RewardModels
from spmd_rl.controller.rollout_metrics import evaluate, judged_correct, keep_conversations, sample_metrics
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.program import RunContext, main
from spmd_rl.runlog.run_log import RunLog

NOTHING_EXCHANGED = {"bytes/exchange/network": 0.0, "update/padding_fraction": 0.0, "update/imbalance_fraction": 0.0}
WHY_NOTHING = "no group of it teaches: the curation keeps none (algorithm.drop_uniform_groups, algorithm.curation)"


def run_grpo(config: Config, ranks: Ranks, story: RunContext, log: RunLog) -> None:
    """Group Relative Policy Optimization, as rank 0 tells it (https://arxiv.org/abs/2402.03300)."""
    train, algorithm, sampling = config.train, config.algorithm, SamplingParams.of(config.rollout)
    estimate, curate, weigh = find_advantage(algorithm), find_curation(algorithm), find_reduction(algorithm)
    reward_models = RewardModels(config, story.data_parallel, story.share_prompts)
    manager = CheckpointManager(config, ranks, log, story.resumed)
    prompts_taken = manager.restored_state().get("prompts_taken", 0)
    reward_models.load_state_dict(manager.restored_state().get("reward_models", {}))
    if manager.first_step == 0 and config.evaluation.before:
        evaluate(ranks, story.benchmarks, config, 0, log)
    for step in range(manager.first_step, train.steps):
        with log.step(step + 1) as timed:
            rows = story.order.take(prompts_taken, train.prompts_per_step)
            prompts_taken += train.prompts_per_step
            # Weights are refreshed on entry; vLLM holds the device inside.
            canary = due(step, config.rollout.canary_steps)
            with ranks.rollout_mode(timed, canary) as moved, timed("rollout"):
                samples, rollout = ranks.generate("train", rows, step, algorithm.samples_per_prompt, sampling)
            # Rule rewards were computed as sequences finished.
            scored, grading = ranks.rewards()
            # Reward models, if there are any, score beside the rules.
            scored, judging = reward_models.score(ranks, samples, scored, timed)

            with timed("adv"):
                groups = [sample.group for sample in samples]
                rewards = [scored[sample.id].reward for sample in samples]
                correct = judged_correct(samples, scored)
                advantages = estimate(groups, rewards)
                advantage_of = {sample.id: advantage for sample, advantage in zip(samples, advantages, strict=True)}
                keep = curate(groups, rewards)
                kept = list(compress(samples, keep))
                # Lengths -> balanced, packed micro-batches of each data-parallel rank.
                plan = plan_microbatches(
                    kept, story.data_parallel, train.minibatches, train.tokens_per_microbatch, story.share_prompts
                )
            # One all-to-all of tokens, never through rank 0.
            if kept:
                with timed("exchange"):
                    log.add_all(ranks.exchange(plan))
            else:
                log.add_all(NOTHING_EXCHANGED)
                log.note(f"step {step + 1}: trains on nothing, since {WHY_NOTHING}")
            # Later mini-batches are off-policy: their ratio needs the policy before the first one.
            if len(plan.minibatches) > 1:
                with timed("old_log_p"):
                    ranks.score("policy")
            if kept and algorithm.kl_coefficient > 0:
                with timed("reference_model"):
                    log.add_all(ranks.score("reference"))
            with timed("update"):
                rate = learning_rate(
                    step,
                    train.learning_rate,
                    train.min_learning_rate,
                    train.schedule,
                    train.warmup_steps,
                    train.steps,
                )
                tokens_of = {sample.id: sample.loss_tokens for sample in kept}
                # One optimizer step each.
                for index, minibatch in enumerate(plan.minibatches):
                    weights = weigh([tokens_of[i] for i in minibatch.ids])
                    advantages = [advantage_of[i] for i in minibatch.ids]
                    log.learning(*ranks.learn(index, minibatch.ids, advantages, weights, rate))

            log.add_all({"grpo/lr": rate} | moved | rollout | grading | judging)
            log.add_all(sample_metrics(samples, scored, config))
            log.add_all(group_fractions(groups, keep, correct))
            keep_conversations(ranks, log, samples, step + 1, config.run.samples_logged)
            costs, holds = ranks.costs()
            log.add_all(costs)
            log.ranks(step + 1, holds)
            ranks.forget()
        if config.evaluation.after if step + 1 == train.steps else due(step + 1, config.evaluation.every_steps):
            evaluate(ranks, story.benchmarks, config, step + 1, log)
        # Beside the next steps; goes on exactly from here.
        manager.maybe_save(step + 1, {"prompts_taken": prompts_taken, "reward_models": reward_models.state_dict()})
    manager.close()
    if config.run.export_hf:
        with log.timed("export"):
            ranks.export_hf(str(story.run_dir / "hf"))


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens at this one."""
    return every > 0 and step % every == 0


if __name__ == "__main__":
    main(run_grpo)
