"""Group Relative Policy Optimization: `torchrun --nproc_per_node 2 -m spmd_rl.grpo --config FILE`."""

from spmd_rl.algorithms.table import compares_with_greedy, find_advantage, find_curation, find_reduction
from spmd_rl.config.config import Config
from spmd_rl.config.names import Phase
from spmd_rl.controller.session import Session
from spmd_rl.program import main
from spmd_rl.runtime.process import leave


def run_grpo(config: Config, session: Session) -> None:
    """Train by Group Relative Policy Optimization (https://arxiv.org/abs/2402.03300)."""
    algorithm = config.algorithm
    estimate, curate = find_advantage(algorithm), find_curation(algorithm)
    reduce = find_reduction(algorithm, config.rollout.max_response_length)
    for step in session.steps():  # from where the run goes on; evaluates, saves and logs around each step
        with step.rollout() as rollout:  # vLLM holds the device inside, with the policy's weights
            samples = rollout.fill(curate)  # where asked to, on until enough groups teach
            greedy = rollout.generate_greedy() if compares_with_greedy(algorithm) else []
        batch = step.reward(samples, greedy)  # rules graded as sequences ended, reward models score now
        batch.keep(curate(batch.groups, batch.rewards))
        step.exchange(batch)  # one all-to-all of tokens to balanced, packed micro-batches
        in_reward = algorithm.kl_in_reward
        step.score("policy", when=step.off_policy or in_reward, whole=in_reward)  # before the update, for the ratio
        step.score("reference", when=algorithm.uses_reference)
        rewards = step.rewards_with_kl() if in_reward else batch.rewards
        with step.timed(Phase.ADVANTAGE):
            advantages = estimate(batch.groups, rewards, tokens=batch.loss_tokens, baselines=batch.baselines)
        step.put("advantages", batch.by_id(advantages))
        step.put("weights", step.weights(reduce))
        for minibatch in step.minibatches():  # one optimizer step each
            step.learn("policy", minibatch)


if __name__ == "__main__":
    leave(main(run_grpo, critic=False))
