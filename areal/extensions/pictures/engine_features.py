"""Pictures as vLLM takes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from areal.extensions.pictures.vision import Picture, sight_of

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec


def features_of(model: Path, tokens: Sequence[int], pictures: Sequence[Picture]) -> "list[MultiModalFeatureSpec]":
    """Return the pictures as the engine takes them, with their places among the tokens. The engine caches the tower's
    vectors of a picture under its name. The cache stays valid, since the tower is not trained. Raises ValueError."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    features = []
    sight = sight_of(str(model))
    for start, picture in zip(sight.starts(np.asarray(tokens), pictures), pictures, strict=False):
        flat = MultiModalFlatField(slices=[[slice(0, len(picture.patches))]], dim=0)
        whole = MultiModalBatchedField(keep_on_cpu=True)
        by_patch, of_whole = sight.features(picture)
        fields = {name: MultiModalFieldElem(torch.from_numpy(value), flat) for name, value in by_patch.items()}
        fields |= {name: MultiModalFieldElem(torch.from_numpy(value), whole) for name, value in of_whole.items()}
        place = PlaceholderRange(start, picture.tokens)
        features.append(MultiModalFeatureSpec(MultiModalKwargsItem(fields), "image", picture.name, place, picture.name))
    return features
