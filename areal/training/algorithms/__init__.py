"""What a training step learns from a batch: the advantages of its tokens, and the loss of each.

In comes the configuration (`TrainerConfig`), out goes an `Algorithm`, which the training engine asks. Read `algorithm`
first, then `decoupled_ppo`; `objectives` finds the losses by name, the further ones in `areal.extensions.losses`.
reference, distillation and critic wrap another algorithm, as `assembly` says.
"""
