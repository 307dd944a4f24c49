"""The messages of pictures on the way to generators and to the trainer.

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
    """Generate with pictures. `pictures`: the digests of each prompt's pictures, in order. A generator that lacks a
    picture answers LackingPictures. The asker then repeats the request with the `files` of the lacking pictures."""

    pictures: Several[Several[Name]]
    files: Several[Bytes] = ()

    @model_validator(mode="after")
    def _has_pictures(self) -> Self:
        if len(self.pictures) != len(self.prompts):
            raise ValueError("there are not as many lists of pictures as prompts")
        return self


class LackingPictures(Message):
    """Digests of the pictures that the asked actor does not have."""

    names: Several[Name]


class OfferPictures(Message):
    """A request for the digests, among `names`, of pictures that the trainer has not stored."""

    names: Several[Name]


class StorePictures(Message):
    """Files of pictures, for the run's record. The answer says that all files are on disk."""

    files: Several[Bytes]
