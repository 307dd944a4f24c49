"""Supervised fine-tuning, before a run or on what a run has sampled."""
