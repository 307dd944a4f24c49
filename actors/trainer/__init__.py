"""The trainer: it stores samples, trains a batch on all ranks, publishes the weights.

Read first: `trainer.py`.
"""
