"""Rewards that a model gives: a judge whose verdict is read, and a reward model behind an address of vLLM."""
