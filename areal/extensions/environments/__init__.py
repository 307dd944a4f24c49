"""Environments: gymnasium, OpenEnv, verifiers and reasoning_gym. `Environment` is public, for environments of users."""

from areal.extensions.environments.environments import Environment

__all__ = ["Environment"]
