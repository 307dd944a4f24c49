"""Algorithms: the advantages of a batch's tokens, and the loss of each token.

In comes the configuration (`TrainerConfig`), out goes an `Algorithm` for the training engine. Read `algorithm` first,
then `decoupled_ppo`. `objectives` finds losses by name, also the losses in `areal.extensions.losses`. The modules
reference, distillation and critic wrap another algorithm, as `assembly` says.
"""
