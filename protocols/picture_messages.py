"""The messages with which pictures travel to generators and to the trainer.

| from | to | request | answer |
|---|---|---|---|
| rollout_manager, evaluator, gateway | generator | GeneratePictured | Done, LackingPictures |
| rollout_manager | trainer | OfferPictures | LackingPictures |
| rollout_manager | trainer | StorePictures | Done |
"""

from typing import Self

from pydantic import model_validator

from protocols.messages import Bytes, Generate, Message, Name, Several


class GeneratePictured(Generate):
    """Generate with `pictures`: of each prompt the digests of its own, in order. Nothing is begun if the generator
    lacks one: then the same is sent with the `files` of those that it lacks."""

    pictures: Several[Several[Name]]
    files: Several[Bytes] = ()

    @model_validator(mode="after")
    def _has_pictures(self) -> Self:
        if len(self.pictures) != len(self.prompts):
            raise ValueError("there are not as many lists of pictures as prompts")
        return self


class LackingPictures(Message):
    """Digests of pictures that the one who was asked does not have."""

    names: Several[Name]


class OfferPictures(Message):
    """Asks which of these pictures, by their digests, the trainer has not stored."""

    names: Several[Name]


class StorePictures(Message):
    """Files of pictures for the run's record; the answer says that all are on disk."""

    files: Several[Bytes]
