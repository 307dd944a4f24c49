"""The trainer: takes scored samples, asks the master for batches, trains on them, and publishes the weights.

In: samples from rollout managers and gateways; batches from the master. Out: weights, checkpoints, metrics, rollouts.
Rank 0 is the actor and commands the other ranks through torch.distributed. Read `trainer.py` first, with the step and
the table of loops. `sample_store.py` keeps samples on disk until a checkpoint covers them, `ranks.py` runs a step on
all ranks, `weight_publisher.py` publishes weights, and `turns.py` shares devices with generators.
"""
