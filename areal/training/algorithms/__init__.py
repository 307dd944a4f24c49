"""What a training step learns from a batch: the advantages of its tokens, and the loss of each.

In comes the configuration (`TrainerConfig`), out goes an `Algorithm`, which the training engine asks. Read `algorithm`
first, then `decoupled_ppo`. Objectives of one equation share a file: gspo (luspo, gmpo), dppo (dppo_kl), decoupled_ppo
(ppo, and those that are settings of it); `objectives` has all by name. reference, distillation and critic wrap another
algorithm, as `assembly` says.
"""
