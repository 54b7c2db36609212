"""The critic's loss, token by token; the weights of reduce.py turn it into one number."""

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return 0.5 * max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) at each response token.

    As in OpenAI's baselines, and verl: a value that has left the range around what it was before the update gets no
    gradient where moving on would bring it nearer to its return. All tensors are flat [N]; `old_values` and `returns`
    carry no gradient. value_clip = 0: not clipped. Returns (loss [N], clipped [N] bool); `clipped` marks the tokens
    whose clipped term is the larger one.
    """
    loss = (values - returns).square()
    if value_clip == 0.0:
        return 0.5 * loss, torch.zeros_like(loss, dtype=torch.bool)
    near = torch.minimum(torch.maximum(values, old_values - value_clip), old_values + value_clip)
    clipped_loss = (near - returns).square()
    return 0.5 * torch.maximum(loss, clipped_loss), (clipped_loss > loss).detach()
