"""The messages of weights on their way: as files, or straight into engines.

| from | to | request | answer |
|---|---|---|---|
| generator | trainer, generator | FetchWeights | stream of WeightFiles, WeightChunk ... |
| generator | trainer | SendWeights | stream of TransferCall |
| generator | trainer | TransferDone | Done |
"""

from typing import Annotated, Literal

from pydantic import Field

from protocols.messages import Bytes, Int64s, Message, Name, Part, Several


class FetchWeights(Message):
    """A request for the files of a policy, from the chunk `first` on. `base`: the (lineage, version) that the asker has
    completely, and from which differences suffice; None: send no differences."""

    lineage: int
    version: int
    first: Annotated[int, Field(ge=0)]
    base: tuple[int, int] | None


class WeightFile(Part):
    """As areal.weights.chunks.FileSums; `checksums` int64 [chunks]."""

    name: Name
    size: Annotated[int, Field(ge=0)]
    checksums: Int64s


class WeightFiles(Message):
    """The first part of the stream: all files of the policy."""

    files: Annotated[Several[WeightFile], Field(max_length=4096)]


class WeightChunk(Message):
    """`data`, uint8 [n]: the chunk or, with `difference`, the difference from the base's chunk."""

    number: int
    data: Bytes
    difference: bool


class SendWeights(Message):
    """A request for a policy's weights straight into the asker's engine, which has `workers` processes. The asker
    makes each call, answers with TransferDone, and reads on. An early end of the stream ends the transfer."""

    lineage: int
    version: int
    workers: Annotated[int, Field(ge=1, le=4096)]


class TransferCall(Message):
    """A call from the trainer's end of vLLM's weight transfer to the engine. `info`: the argument, as JSON."""

    number: int
    call: Literal["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    info: str


class TransferDone(Message):
    """The engine has made the call `number` of the asker's open transfer."""

    number: int
