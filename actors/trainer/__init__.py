"""The trainer: takes scored samples, asks the master for batches, trains on them, and publishes the weights.

In: samples from rollout managers and gateways; batches from the master. Out: weights, checkpoints, metrics, rollouts.
Rank 0 is the actor; the other ranks hear from it through torch.distributed. Read `trainer.py` first: it has the step
and the table of loops. `sample_store.py` keeps samples on disk until a checkpoint covers them, `ranks.py` runs a step
on all ranks, `turns.py` shares devices with generators, and `probes.py` compares log-probs with the generators'.
"""
