"""Rewards that a model gives: a judge with a verdict (judge.py), and a reward model behind an address of vLLM."""
