"""Supervised fine-tuning, before a run or on a run's samples."""
