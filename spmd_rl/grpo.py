"""Group Relative Policy Optimization: `torchrun --nproc_per_node 2 -m spmd_rl.grpo --config FILE`."""

from spmd_rl.algorithms.advantage import group_advantages
from spmd_rl.algorithms.curation import teaching
from spmd_rl.algorithms.reduce import token_weights
from spmd_rl.algorithms.schedule import learning_rate
from spmd_rl.config.config import Config
from spmd_rl.controller.measure import evaluate, sample_metrics
from spmd_rl.controller.planner import plan_microbatches
from spmd_rl.controller.ranks import Ranks
from spmd_rl.controller.run_log import RunLog
from spmd_rl.data.prompts import PromptOrder
from spmd_rl.program import Story, main


def run_grpo(config: Config, ranks: Ranks, story: Story, log: RunLog) -> None:
    """GRPO as rank 0 tells it (https://arxiv.org/abs/2402.03300)."""
    train, algorithm = config.train, config.algorithm
    order = PromptOrder(story.train_prompts, config.run.seed, config.data.shuffle)
    if config.evaluation.before:
        log.evaluation(0, evaluate(ranks, story, config, step=0))
    for step in range(train.steps):
        with log.step(step + 1) as timed:
            with timed("reshard_to_infer"):
                log.add_all(ranks.to_rollout())
            with timed("rollout"):
                tickets, rollout = ranks.generate(
                    "train", order.take(step, train.prompts_per_step), step, algorithm.samples_per_prompt, greedy=False
                )
            with timed("reshard_to_train"):
                ranks.to_training()
            rewards, grading = ranks.rewards()

            with timed("adv"):
                advantages = group_advantages(tickets, rewards, algorithm)
                kept, groups = teaching(tickets, rewards, algorithm.drop_uniform_groups)
                plan = plan_microbatches(
                    kept, story.data_parallel, train.minibatches, train.tokens_per_microbatch, story.share_prompts
                )
            log.add_all(ranks.exchange(plan))
            if len(plan.minibatches) > 1:  # later mini-batches are off-policy: their ratio needs the policy before them
                with timed("old_log_p"):
                    ranks.score("policy")
            if algorithm.kl_coefficient > 0:
                with timed("reference_model"):
                    log.add_all(ranks.score("reference"))
            with timed("update"):
                for index, minibatch in enumerate(plan.minibatches):  # one optimizer step each
                    weights = token_weights(minibatch.ids, kept, algorithm.loss_reduction)
                    log.learning(ranks.learn(index, minibatch.ids, advantages, weights, learning_rate(step, train)))

            log.add_all(rollout | grading | groups | sample_metrics(tickets, rewards, config))
            log.samples(step + 1, ranks, tickets, rewards)
            ranks.forget()
        if config.evaluation.every_steps and (step + 1) % config.evaluation.every_steps == 0 and step + 1 < train.steps:
            log.evaluation(step + 1, evaluate(ranks, story, config, step + 1))
    if config.evaluation.after:
        log.evaluation(train.steps, evaluate(ranks, story, config, train.steps))
    if config.run.export_hf:
        ranks.export_hf(str(story.run_dir / "hf"))


if __name__ == "__main__":
    main(run_grpo)
