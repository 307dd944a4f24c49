"""Our part of vLLM's worker as it is on GPUs, for engines on the CPU. vLLM imports this module by name."""

from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none

from areal.generation.vllm_worker import PolicyWorker


class ReloadingWorker(PolicyWorker):
    """Loads new weights by vLLM's own `reload_weights`, never in place."""

    _unpacked = None

    def load_policy(self) -> None:
        reload_weights = self.model_runner.reload_weights
        configs = []

        def ask_and_reload(**arguments: Any) -> None:
            configs.append(get_current_vllm_config_or_none())
            reload_weights(**arguments)

        self.model_runner.reload_weights = ask_and_reload
        super().load_policy()
        self.model_runner.reload_weights = reload_weights
        self._had_config = configs[0] is self.vllm_config

    def reloaded_with_the_config(self) -> bool:
        """In the last `load_policy`: some layers of GPUs ask for it."""
        return self._had_config

    def schedules_ahead(self) -> bool:
        return bool(self.model_runner.use_async_scheduling)


class NotingRunner:
    """Mixin of vLLM's second model runner, which does not keep what the first does. In the configuration vLLM's
    platform of CPUs takes it back once the engine has started."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self.use_async_scheduling = vllm_config.scheduler_config.async_scheduling


if envs.VLLM_USE_V2_MODEL_RUNNER:
    from vllm.v1.worker.cpu import model_runner

    model_runner.CPUModelRunner = type("CPUModelRunner", (NotingRunner, model_runner.CPUModelRunner), {})
