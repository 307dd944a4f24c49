"""Environments: gymnasium, OpenEnv, verifiers and reasoning_gym."""
