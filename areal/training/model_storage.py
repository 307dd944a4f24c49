"""The folders that a training engine writes and reads: published weights, checkpoints, exported models."""

from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from areal.storage.disk import DiskRetry
from areal.training.agreement import RankMessages, Writer
from areal.training.checkpoint import TrainingState
from areal.training.shards import Copied, ModelFolder, Published, WeightCopies
from areal.training.trained_model import TrainedModel
from areal.weights.chunks import Manifest


class ModelStorage:
    """Writes the weights and the training state of a model, and loads checkpoints. All methods are for all ranks."""

    def __init__(self, model: TrainedModel, messages: RankMessages, disk_retry: DiskRetry) -> None:
        self._model = model
        self._state = TrainingState(model.deepspeed, model.trained, model.stage, model.division, messages.group)
        adapters = bool(model.config.lora)
        self._weights = WeightCopies(model.module, model.published, messages, model.division, adapters)
        self._snapshot = dict[str, Tensor]()
        self._publisher, self._saver = Writer(disk_retry), Writer(disk_retry)

    def snapshot(self) -> None:
        """Copy the current weights into host memory, each on the rank that writes it, for `begin_write`.

        The copy overwrites the previous snapshot, which must no longer be in use.
        """
        self._copied = self._copy(self._snapshot)

    def _copy(self, copies: dict[str, Tensor]) -> Copied:
        if self._model.stage == 3:
            # A pass without a backward pass leaves parameters that DeepSpeed has begun to gather for it.
            self._model.deepspeed.optimizer.empty_partition_cache()
        return self._weights.copy(copies, self._model.whole)

    def begin_write(self, folder: Path) -> Future[Manifest | None]:
        """Begin to write the last snapshot into `folder`, in the model's dtype, for generators.

        Training steps may run meanwhile. Adapters are written without the weights they belong to. The folder appears
        complete or not at all (`Writer.begin`). On rank 0 the result is the manifest of the files.
        """
        return self._publisher.begin(folder, Published(self._copied))

    def publish(self, folder: Path) -> Path:
        """Write the current weights and wait for the disk. Returns `folder`."""
        self.snapshot()
        self.begin_write(folder).result()
        return folder

    def begin_save(self, folder: Path, run: str = "") -> Future[Manifest | None]:
        """Copy the current weights and training state, and begin to write a checkpoint: a model folder that loads
        without further files, with the state for `load`. run: the identity of the run.

        Training steps and `begin_write` may run meanwhile. The folder appears complete or not at all. Until then the
        copies take up host memory: on each rank 12 bytes per trained parameter, divided by the number of ranks, and on
        rank 0's host the weights, divided by the number of the host's ranks. With the same number of ranks and threads
        and the same ZeRO stage, fp32 training on the CPU that resumes from a checkpoint gives the same bits as
        uninterrupted training.
        """
        share, copied = self._state.copy(run), self._copy({})
        return self._saver.begin(folder, ModelFolder(copied, self._model.source, self._model.config.dtype, share))

    def save(self, folder: Path) -> Path:
        """Write a checkpoint and wait for the disk. Returns `folder`."""
        self.begin_save(folder).result()
        return folder

    def export(self, folder: Path) -> Path:
        """Write a model folder as in a checkpoint, but without the training state to resume from. Returns `folder`."""
        contents = ModelFolder(self._copy({}), self._model.source, self._model.config.dtype, None)
        self._saver.begin(folder, contents).result()
        return folder

    def load(self, folder: Path, run: str = "") -> None:
        """Resume from a checkpoint of `save`, written with any number of ranks and at any ZeRO stage.

        Raises UserError on every rank, before anything is changed, if the folder holds no checkpoint, a damaged
        checkpoint, or a checkpoint of another model or of another run than `run`.
        """
        self._state.load(folder, run)

    def close(self) -> None:
        """Wait until all folders are written."""
        self._publisher.close()
        self._saver.close()
