"""Our part of vLLM's worker as it is on GPUs, for engines on the CPU. vLLM imports this module by name."""

from areal.generation.vllm_worker import PolicyWorker


class ReloadingWorker(PolicyWorker):
    """Loads new weights by vLLM's own `reload_weights`, never in place."""

    _unpacked = None

    def schedules_ahead(self) -> bool:
        return bool(self.model_runner.use_async_scheduling)
