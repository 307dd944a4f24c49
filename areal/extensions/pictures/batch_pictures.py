"""The pictures of a batch: read on rank 0, computed by the model's tower on all ranks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from areal.extensions.pictures.frozen_tower import FrozenTower
from areal.extensions.pictures.views import Views
from areal.training.packed import FlatBatch
from areal.training.trained_model import TrainedModel


class BatchPictures:
    """The pictures of prompts. folder: of the pictures' files."""

    def __init__(self, model: TrainedModel, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._views: Views | None = None
        self._tower: FrozenTower | None = None

    def views(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the pictures by name, in the tower's form (rank 0)."""
        self._views = self._views or Views(str(self._model.source))

        def count_work() -> None:
            self._model.work_done += 1

        return self._views.look_all(names, self._folder, count_work)

    def tower_on(self, flat: FlatBatch) -> FrozenTower:
        """Compute the pictures of a batch in the model's tower, and return the tower (all ranks)."""
        self._tower = self._tower or FrozenTower(self._model.module, self._model.source, self._model.device)
        self._tower.look(flat)
        return self._tower
