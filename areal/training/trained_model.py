"""The model under training on one rank, and the start of DeepSpeed around the model.

Only this module, `checkpoint`, `areal.cpu` and extensions import DeepSpeed.
"""

import atexit
import copy
import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.base import extensions
from areal.base.errors import explain
from areal.base.network_interfaces import choose_interface
from areal.base.processes import importing
from areal.config.trainer_section import TrainerConfig
from areal.cpu import deepspeed_on_cpu as cpu
from areal.training.agreement import SILENCE
from areal.training.division import Division
from areal.training.head import Head
from areal.training.model_reader import ModelReader
from areal.training.optimizer import (
    bucket_elements,
    deepspeed_config,
    learning_rates,
    parameter_groups,
    value_head_group,
)


def join_ranks() -> None:
    """Initialise torch.distributed, unless done before. The shutdown waits for exit: DeepSpeed keeps its groups."""
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    os.environ.setdefault("LOCAL_RANK", "0")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if "WORLD_SIZE" in os.environ:
        choose_interface(os.environ["MASTER_ADDR"])
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)


@cache
def control_group() -> dist.ProcessGroup:
    """Return the group in which ranks agree on values in host memory, also if weights are sent by NCCL.

    All engines of a process share the group: a group of gloo has threads that wake 100 times a second, even with one
    rank.
    """
    return dist.new_group(backend="gloo", timeout=SILENCE)


def open_deepspeed(config: TrainerConfig, cuda: bool) -> None:
    """Set the options that the devices need, import DeepSpeed and join all ranks (all ranks)."""
    if not cuda:
        cpu.set_environment(config.dtype)
    if not cuda or config.offload != "none":
        torch.set_num_threads(config.threads)
    with importing():
        import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # DeepSpeed's calls
    # By default cuBLAS adds the parts of a bf16 product in bf16.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if not cuda:
        cpu.compile_no_op()
    join_ranks()
    with redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False)


def check_settings(settings: dict[str, Any]) -> None:
    """Raise UserError if DeepSpeed, which is imported here, refuses `settings`. DeepSpeed itself would refuse them only
    after reading the model, which may take minutes."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    with explain(
        (AssertionError, AttributeError, DeepSpeedConfigError, KeyError, TypeError, ValueError),
        "DeepSpeed does not take trainer.deepspeed_options: {why}",
    ):
        DeepSpeedConfig(copy.deepcopy(settings))


def _trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class TrainedModel:
    """The model that an engine trains, with its adapters and its critic. Call `start` before the first pass.

    source: folder of the model. reader: of the model's files. division: of the weights over ranks. module: the model in
    transformers. critic: the value head, or None. deepspeed: DeepSpeed's engine around the module. trained: the trained
    parameters by name. published: the trained parameters without the critic's, for generators.
    """

    work_done = 0
    """Micro-batches computed, parameters gathered and pictures read since the start. Rises unless work hangs."""

    def __init__(self, source: Path, config: TrainerConfig, reader: ModelReader, division: Division) -> None:
        """Read the model (all ranks). Raises UserError."""
        self.source, self.config, self.reader, self.division = source, config, reader, division
        self.stage: int = reader.stage
        self.module: Any = reader.read(source)
        self.head = Head(self.module)
        self.vocab_size: int = self.module.config.get_text_config().vocab_size
        if config.gradient_checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        if config.lora:
            add_adapters = extensions.need("lora", "add", "trainer.lora").load()
            self.module = add_adapters(self.module, config.lora, source)
            self.head.refuse_adapters()
        division.begin(self.module)
        self._groups = parameter_groups(_trainable(self.module).values(), config.weight_decay)
        if config.critic:
            self.module.value_head = self.head.add_critic(config.critic)
            self._groups.append(value_head_group(self.module.value_head, config.critic.lr))
        self.critic = self.head.critic
        division.name_groups(self._groups)

    def start(self, settings: dict[str, Any], optimizer_steps: int) -> None:
        """Wrap the module in DeepSpeed's engine (all ranks). settings: DeepSpeed's configuration."""
        import deepspeed

        self.zero = deepspeed.zero
        sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in _trainable(self.module).items()}
        settings["zero_optimization"].setdefault("reduce_bucket_size", bucket_elements(sizes))
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints memory tables
            self.deepspeed, *_ = deepspeed.initialize(
                model=self.module,
                model_parameters=self._groups,
                config=settings,
                lr_scheduler=lambda optimizer: learning_rates(optimizer, self.config, optimizer_steps),
            )
        self.division.find(self.deepspeed)
        self.trained = _trainable(self.module)
        self.published = {name: p for name, p in self.trained.items() if not name.startswith("value_head.")}
        self.device: torch.device = self.deepspeed.device
        if self.stage == 0 and dist.get_world_size() == 1:
            self.deepspeed.enable_backward_allreduce = False  # useless here, yet a tenth of a small model's step

    def start_reference(self, fit: Callable[[torch.nn.Module, Head], None]) -> Any:
        """Return the reference model of the KL penalty (all ranks). fit: called with the model and its head.

        None if there is no penalty, if a scorer has the model, or if the policy with disabled adapters is the
        reference. Under ZeRO 3 each rank holds a part of the reference model, else the whole.
        """
        folder = Path(self.config.reference or self.source)
        adapted = self.config.lora and folder.resolve() == self.source.resolve()
        if not self.config.kl_coef or self.config.reference_scorer or adapted:
            return None
        module: Any = self.reader.read(folder).requires_grad_(False).eval()
        head, reference = Head(module), module
        if self.stage < 3:
            module.to(self.device)
        else:
            import deepspeed

            settings = deepspeed_config(self.config)
            del settings["optimizer"]
            settings["zero_optimization"].pop("offload_optimizer", None)
            with redirect_stdout(io.StringIO()):
                reference = deepspeed.initialize(model=module, config=settings)[0]
        fit(module, head)
        return reference

    @contextmanager
    def whole(self, parameter: torch.nn.Parameter) -> Iterator[Tensor]:
        """Gather a parameter for the block, and yield the whole tensor (all ranks)."""
        with self.zero.GatheredParameters([parameter], enabled=self.stage == 3):
            yield self.division.whole(parameter)
        self.work_done += 1
