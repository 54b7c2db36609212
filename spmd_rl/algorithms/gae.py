"""Advantages and returns of tokens, from a critic's values (https://arxiv.org/abs/1506.02438)."""

import torch
from torch import Tensor


def token_rewards(rewards: Tensor, lengths: Tensor, tokens: int, kl: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """Return the reward of each token [S, N]: a sample's reward at its last token, and -beta * kl at each of them.

    `rewards` and `lengths` [S]; `tokens`: N, those of the longest sample; `kl` [S, N], 0 beyond a sample's end. A
    sample of length 0 has no last token, and earns nothing.
    """
    place = torch.arange(tokens, device=rewards.device)
    earned = torch.where(place == lengths[:, None] - 1, rewards[:, None], rewards.new_zeros(()))
    return earned if kl is None or beta == 0.0 else earned - beta * kl


def generalized_advantages(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, each [S, N], of token rewards and values [S, N].

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1} (equations 11 to 16), R_t = A_t + V_t. The
    value after a sample's last token is 0: the response is over. Samples are filled up with zeros at their end, which
    leaves what comes before as it is.
    """
    following = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), dim=1)
    advantages = rewards + gamma * following - values  # delta, and what comes after is added to it
    for place in range(values.shape[1] - 2, -1, -1):
        advantages[:, place] += gamma * lam * advantages[:, place + 1]
    return advantages, advantages + values
