"""The value head of a critic, on the hidden states of the policy's body."""

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from areal.config.trainer_section import CriticConfig


class ValueHead(torch.nn.Linear):
    """The critic: the expected credit of a token, from the hidden state before the token.

    The value is the mean of the products of weights and features, whose root mean square is 1. So a learning rate says
    how far a value moves in a step at any width of the model, and clipping the norm leaves the gradient of the weights
    small beside the gradient of the body. At first all values are 0. share: the share of the values' gradient by the
    hidden states that reaches the body. policy_share: the share of the policy's loss beside the loss of the values.
    Both are 0 in the optimizer steps that train the head alone.
    """

    def __init__(self, width: int, dtype: torch.dtype, config: CriticConfig) -> None:
        super().__init__(width, 1, dtype=dtype)
        self._config = config
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)
        self.follow(0)

    def follow(self, steps: int) -> None:
        """Set the shares after `steps` optimizer steps of the run."""
        alone = steps < self._config.warmup_steps
        self.share, self.policy_share = (0.0, 0.0) if alone else (self._config.coef, 1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [U, H]. Returns fp32 [U]."""
        hidden = hidden.detach() + self.share * (hidden - hidden.detach())
        features = rms_norm(hidden.float(), hidden.shape[-1:])
        return linear(features, self.weight.float() / hidden.shape[-1], self.bias.float())[:, 0]
