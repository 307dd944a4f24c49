"""The training state in a checkpoint: fp32 weights (masters), Adam's moments, the schedule, random generators.

The state is stored as safetensors and JSON, with checksums, in a subfolder of the model folder that model loaders
ignore. Each rank writes a *share*: parts of the flattened parameters, [start, stop) each, with their moments. Under
ZeRO 1 to 3 a share has the parts that the rank holds, else an equal part of each parameter. Names and places are of the
undivided model. So a checkpoint can be loaded with another number of ranks, at another ZeRO stage and with another
`Division`: each rank reads the parts that it needs. Loading a checkpoint runs no code of its author.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from isal import isal_zlib as zlib
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal.base.errors import UserError
from areal.storage.records import record_of
from areal.storage.run_folder import STATE_FILE
from areal.training.agreement import agree
from areal.training.division import Division, Fragment
from areal.weights.folders import sync, write_tensors

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

FOLDER = "training"
MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *MOMENTS)
# Elements in memory while checksums are computed.
ELEMENTS_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of the state, copied to host memory. tensors: by each of KINDS, the elements of all `parts` in a
    row, fp32 [n]; and states of random generators. parts: in the undivided model. facts: stored by rank 0 alone."""

    parts: list[Fragment]
    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def write(self, model: Path) -> None:
        """Write the share to disk, into the model folder `model`."""
        file = model / FOLDER / share_file(dist.get_rank(), dist.get_world_size())
        sums = {name: _checksum([tensor]) for name, tensor in self.tensors.items()}
        write_tensors(self.tensors, file, parts=json.dumps(self.parts), sums=json.dumps(sums))
        sync(file)


def share_file(rank: int, ranks: int) -> str:
    return f"rank_{rank:05}-of-{ranks:05}.safetensors"


class TrainingState:
    """Saves and loads the state of a DeepSpeed engine whose optimizer is torch's AdamW, at any ZeRO stage.

    parameters: the trained parameters, by name. division: of the model. control: a CPU process group of all ranks.
    """

    def __init__(
        self,
        engine: "DeepSpeedEngine",
        parameters: Mapping[str, torch.nn.Parameter],
        stage: int,
        division: Division,
        control: dist.ProcessGroup,
    ) -> None:
        self._engine = engine
        self._stage = stage
        self._division = division
        self._control = control
        self._parameters = parameters
        self._make_moments()

    def _make_moments(self) -> None:
        """Create Adam's moments for `load` to fill: Adam would create them only in its first step."""
        adam = self._engine.basic_optimizer
        for tensor in self._optimized():
            zeros = {moment: torch.zeros_like(tensor) for moment in MOMENTS}
            # on the device, because this Adam is fused
            adam.state[tensor] = {"step": torch.zeros((), device=tensor.device)} | zeros
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()  # as in the optimizer's own first step

    def _optimized(self) -> list[Tensor]:
        """Return the tensors that Adam updates: the parameters, or this rank's flat partitions of them."""
        if self._stage == 3:
            return self._engine.optimizer.fp32_partitioned_groups_flat
        return [tensor for group in self._engine.basic_optimizer.param_groups for tensor in group["params"]]

    def _share(self) -> Iterator[Fragment]:
        """Yield the parts of this rank's parameters that the rank saves."""
        for name, parameter in self._parameters.items():
            if self._stage == 0:
                number, holders = self._division.holders(parameter)
                start, stop = (parameter.numel() * end // holders for end in (number, number + 1))
            elif self._stage == 3:  # the last rank's part is padded
                start = parameter.ds_tensor.numel() * dist.get_rank(parameter.ds_process_group)
                stop = min(start + parameter.ds_tensor.numel(), parameter.ds_numel)
            elif parameter._hp_mapping is None:
                continue
            else:
                start = parameter._hp_mapping.lp_fragment_address.start
                stop = start + parameter._hp_mapping.lp_fragment_address.numel
            if start < stop:
                yield Fragment(name, start, stop)

    def _elements(self, part: Fragment, kind: str) -> Tensor:
        """Return this rank's elements of a part, [n], as a view."""
        parameter, key = self._parameters[part.name], None if kind == MASTER else kind
        if self._stage == 0:
            tensor = parameter if key is None else self._engine.basic_optimizer.state[parameter][key]
            return tensor.detach().view(-1)[part.start : part.stop]
        if self._stage == 3:
            held, _ = self._engine.optimizer._get_fp32_opt_state_partition(parameter, False, key)
            return held.detach()[: part.size]
        return parameter._hp_mapping.get_hp_fragment(key).detach()

    def copy(self, run: str = "") -> Share:
        """Copy this rank's share of the state to host memory: 12 bytes per parameter, divided by the number of ranks
        (all ranks; the ranks need not be in step). run: the identity of the run, stored with the state."""
        saves = {name: self._stage == 0 or self._division.saves(p) for name, p in self._parameters.items()}
        parts = [part for part in self._share() if saves[part.name]]
        tensors = {kind: torch.empty(sum(part.size for part in parts)) for kind in KINDS}
        for kind, flat in tensors.items():
            for part, elements in _cut(flat, parts):
                elements.copy_(self._elements(part, kind))
        random = {f"random.{kind}": state for kind, state in _random_states().items()}
        places = [place for part in parts for place in self._division.place(part)]
        return Share(places, tensors | random, self._facts() | {"run": run})

    def _facts(self) -> dict[str, Any]:
        return {
            "shares": dist.get_world_size(),
            "optimizer_steps": self._engine.lr_scheduler.last_epoch,
            "adam_steps": {
                stored: self._adam_step(parameter).item()
                for name, parameter in self._parameters.items()
                for stored in self._division.shapes(name, parameter)
            },
            "shapes": self._shapes(),
        }

    def _adam_step(self, parameter: torch.nn.Parameter) -> Tensor:
        """Return Adam's step count. Under ZeRO 0 a parameter counts only the steps in which it had a gradient."""
        return self._engine.basic_optimizer.state[parameter if self._stage == 0 else self._optimized()[0]]["step"]

    def _shapes(self) -> dict[str, list[int]]:
        shapes = [self._division.shapes(name, parameter) for name, parameter in self._parameters.items()]
        return {name: shape for of_parameter in shapes for name, shape in of_parameter.items()}

    def load(self, model: Path, run: str = "") -> None:
        """Restore the state from the model folder `model` (all ranks).

        Each rank reads its own share, after the checksums of an equal part of all shares. run: if given, the state has
        to be of this run, or of no run. Raises UserError on all ranks, before anything is changed, if the folder holds
        no training state, or the state of another model or run, or if a share is missing or damaged.
        """
        opened: list[_StoredState] = []
        agree(lambda: opened.append(_StoredState(model, self._shapes(), run)), self._control)
        stored = opened[0]
        for kind in KINDS:
            if self._stage:
                for part in self._share():
                    self._read(stored, part, kind, self._elements(part, kind))
            else:
                self._load_everything(stored, kind)
        self._update_weights()
        self._set_adam_steps(stored.facts["adam_steps"])
        self._set_schedule(stored.facts["optimizer_steps"])
        stored.set_random_states()

    def _read(self, stored: "_StoredState", part: Fragment, kind: str, to: Tensor) -> None:
        """Read the elements of a part of this rank's parameter into `to`, [n]."""
        for place, elements in _cut(to, self._division.place(part)):
            stored.read(place, kind, elements)

    def _load_everything(self, stored: "_StoredState", kind: str) -> None:
        """Load all parameters. A rank reads its part of a divided parameter. An undivided parameter is read by one
        rank, which sends it to all ranks."""
        ranks = dist.get_world_size()
        for number, (name, parameter) in enumerate(self._parameters.items()):
            everything = Fragment(name, 0, parameter.numel())
            is_divided, reader = self._division.holders(parameter)[1] < ranks, number % ranks
            flat = torch.empty(everything.size)
            if is_divided or reader == dist.get_rank():
                self._read(stored, everything, kind, flat)
            if not is_divided:
                dist.broadcast(flat, reader, group=self._control)
            self._elements(everything, kind).copy_(flat)

    def _update_weights(self) -> None:
        """Round the masters to the weights, as DeepSpeed does at the end of a step (all ranks)."""
        optimizer = self._engine.optimizer
        if self._stage == 3:
            optimizer.checkpoint_event_prologue()  # afterwards no parameter is gathered
            for number in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            optimizer.checkpoint_event_epilogue()
        elif self._stage:
            optimizer.update_lp_params()

    def _set_adam_steps(self, steps: Mapping[str, float]) -> None:
        if self._stage == 0:
            for name, parameter in self._parameters.items():
                self._adam_step(parameter).fill_(steps[self._division.name(name)])
        else:
            for tensor in self._optimized():
                self._engine.basic_optimizer.state[tensor]["step"].fill_(max(steps.values()))

    def _set_schedule(self, steps: int) -> None:
        """Restore only the step count: the learning rates follow from the configuration of this run."""
        schedule = self._engine.lr_scheduler
        # `step` adds 1 to last_epoch. With _step_count 0 this call counts as the first and does not warn.
        schedule.load_state_dict(schedule.state_dict() | {"last_epoch": steps - 1, "_step_count": 0})
        schedule.step()
        schedule.load_state_dict(schedule.state_dict() | {"_step_count": steps + 1})


class _StoredState:
    """The training state in the model folder `model`, all files open. shapes: the parameters', in this run. run: the
    identity that the state has to have, or "". Raises UserError."""

    def __init__(self, model: Path, shapes: Mapping[str, list[int]], run: str) -> None:
        file = model / STATE_FILE
        if not file.is_file():
            raise UserError(f"{model} is not a checkpoint to resume from: it has no {STATE_FILE}.")
        try:
            if (facts := record_of(file.read_bytes())) is None:
                raise ValueError("it is not as it was written")
            self.facts: dict[str, Any] = facts
            if run and self.facts["run"] != run:
                raise UserError(f"The checkpoint {model} is of another run: put back that of this run.")
            if self.facts["shapes"] != shapes:
                raise UserError(
                    f"The checkpoint {model} belongs to another model than the run's, or has another trainer.lora, or "
                    f"only one of the two has a trainer.critic, or they have another trainer.tensor_parallel."
                )
            self._shares: list[Any] = []
            self._places: dict[str, list[tuple[Fragment, int, int]]] = {name: [] for name in shapes}
            for rank in range(self.facts["shares"]):
                file = model / FOLDER / share_file(rank, self.facts["shares"])
                self._shares.append(safe_open(file, framework="pt"))
                self._note_places(rank)
            self._check_places(shapes)
            for rank in range(dist.get_rank(), len(self._shares), dist.get_world_size()):
                file = model / FOLDER / share_file(rank, len(self._shares))
                self._check_sums(rank)
        except (KeyError, OSError, SafetensorError, TypeError, ValueError) as error:
            raise UserError(
                f"The training state of the checkpoint {model} is damaged: {file.name} is missing or does not fit "
                f"({error})."
            ) from error

    def _note_places(self, rank: int) -> None:
        """Note the share and the place in its tensors for each part of a rank's share."""
        share, place = self._shares[rank], 0
        for part in (Fragment(*part) for part in json.loads(share.metadata()["parts"])):
            self._places[part.name].append((part, rank, place))
            place += part.size
        if any(share.get_slice(kind).get_shape() != [place] for kind in KINDS):
            raise ValueError(f"its tensors do not have {place} elements")

    def _check_places(self, shapes: Mapping[str, list[int]]) -> None:
        for name, places in self._places.items():
            places.sort()
            ends = [0, *(end for part, _, _ in places for end in (part.start, part.stop)), prod(shapes[name])]
            if any(stop != start for stop, start in list(pairwise(ends))[::2]):
                raise ValueError(f"{name} is not stored as a whole")

    def _check_sums(self, rank: int) -> None:
        """Compare the tensors of a rank's share with their checksums."""
        share = self._shares[rank]
        for name, checksum in json.loads(share.metadata()["sums"]).items():
            stored = share.get_slice(name)
            (size,) = stored.get_shape()
            pieces = (stored[start : start + ELEMENTS_AT_ONCE] for start in range(0, size, ELEMENTS_AT_ONCE))
            if _checksum(pieces) != checksum:
                raise ValueError(f"{name} does not have the checksum that it was written with")

    def read(self, part: Fragment, kind: str, to: Tensor) -> None:
        """Read a part's elements of a kind into `to`, [n]."""
        for source, rank, place in self._places[part.name]:
            start, stop = max(source.start, part.start), min(source.stop, part.stop)
            if start < stop:
                first = place + start - source.start
                to[start - part.start : stop - part.start] = self._read(rank, kind, first, first + stop - start)

    def _read(self, rank: int, kind: str, first: int, last: int) -> Tensor:
        return self._shares[rank].get_slice(kind)[first:last]

    def set_random_states(self) -> None:
        """Restore this rank's random generators. Ranks and kinds of device without a stored state keep their state."""
        setters = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
        if dist.get_rank() < len(self._shares):
            share = self._shares[dist.get_rank()]
            for kind in _random_states():
                if (name := f"random.{kind}") in share.keys():  # noqa: SIM118 - it is not a dict
                    setters[kind](share.get_tensor(name))


def _checksum(pieces: Iterable[Tensor]) -> int:
    """The CRC-32 of a tensor in pieces, [n] each."""
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece.contiguous().view(torch.uint8).numpy().data, checksum)
    return checksum


def _cut(flat: Tensor, parts: Iterable[Fragment]) -> Iterator[tuple[Fragment, Tensor]]:
    """Yield the parts with their elements of `flat`, which holds all parts in a row."""
    place = 0
    for part in parts:
        yield part, flat[place : place + part.size]
        place += part.size


def _random_states() -> dict[str, Tensor]:
    """The states of torch's random generators by kind of device, uint8 [n] each, on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states
