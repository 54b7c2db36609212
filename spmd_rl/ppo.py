"""Proximal Policy Optimization with a critic: `torchrun --nproc_per_node 2 -m spmd_rl.ppo --config FILE`."""

from spmd_rl.algorithms.table import find_curation, find_reduction
from spmd_rl.config.config import Config
from spmd_rl.controller.session import Session
from spmd_rl.program import main
from spmd_rl.runtime.process import leave


def run_ppo(config: Config, session: Session) -> None:
    """Train by Proximal Policy Optimization (https://arxiv.org/abs/1707.06347)."""
    algorithm = config.algorithm
    curate, reduce = find_curation(algorithm), find_reduction(algorithm, config.rollout.max_response_length)
    for step in session.steps():  # from where the run goes on; evaluates, saves and logs around each step
        with step.rollout() as rollout:  # vLLM holds the device inside, with the policy's weights
            samples = rollout.fill(curate)  # where asked to, on until enough groups teach
        batch = step.reward(samples)  # rules graded as sequences ended, reward models score now
        batch.keep(curate(batch.groups, batch.rewards))
        step.exchange(batch)  # one all-to-all of tokens to balanced, packed micro-batches
        learns, in_reward = step.number >= config.critic.warmup_steps, algorithm.kl_in_reward
        ratio = learns and step.off_policy
        step.score("policy", when=ratio or in_reward, whole=in_reward)  # before the update
        step.score("reference", when=algorithm.uses_reference)
        step.score("critic")  # the value of the state before each token
        step.estimate_gae(batch.by_id(batch.rewards), session.kl_control)  # whitened over all tokens of all ranks
        step.put("weights", step.weights(reduce))
        for minibatch in step.minibatches("critic"):  # one optimizer step each
            step.learn("critic", minibatch)
        for minibatch in step.minibatches("policy", when=learns):
            step.learn("policy", minibatch)


if __name__ == "__main__":
    leave(main(run_ppo, critic=True))
