"""The kernels of a training step, each alone, against float64 references in the shapes of the run's model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from areal.config.trainer_section import TrainerConfig
from areal.extensions.desk.bare_models import of_layers
from areal.extensions.selftest import references
from areal.extensions.selftest.findings import LAYERS, SHARE, Finding, judged
from areal.training import head
from areal.training.attention import FLASH, attention_kwargs, choose_attention, row_inputs
from areal.training.flops import layers_by_window
from areal.training.guard import GAP
from areal.training.head import Head, linear_logprobs
from areal.training.model_checks import keeps_apart, random_groups
from areal.training.packed import FlatBatch, PackedRow, pack

LENGTHS, SHARED = ((300, 260, 200), (129, 2), (128,)), 150
"""Tokens of the samples of each group, and the number of tokens shared by the samples of the first group."""
SHORT_LENGTHS, SHORT_SHARED = ((40, 33, 30), (17,)), 20
WINDOW = 100
"""The window, in tokens, for the check of a model with sliding-window attention. The model's own window is longer."""
TEMPERATURE = 0.8
BEYOND = 1.2
"""The logits in the check of the head, as a multiple of the most logits at once, so that the head works in parts."""


def share_of_error(tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the norm of all errors together, divided by the norm of the exact tensors."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(tensors, exact, strict=True)]
    error = sum(float((tensor - reference).square().sum()) for tensor, reference in pairs)
    return (error / sum(float(reference.square().sum()) for _, reference in pairs)) ** 0.5


def check_attention(sizes: Any, dtype: str, device: torch.device) -> Finding:
    """Check the attention of training, forward and backward, on a row of several sequences, by a model's layer."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = choose_attention(dtype)
    model = _few_layers(sizes, dtype, kind, device)
    layer = next((part for part in model.modules() if hasattr(part, "num_key_value_groups")), None)
    if layer is None:
        return Finding("attention", "skipped", "the model has no layer of the usual attention")
    row, _ = _row(100, LENGTHS, SHARED, device, prefix_tree=kind != FLASH)
    heads = sizes.num_attention_heads
    width = getattr(sizes, "head_dim", None) or sizes.hidden_size // heads
    kv_heads = getattr(sizes, "num_key_value_heads", None) or heads
    torch.manual_seed(0)
    tokens, options = row.tokens.shape[1], {"dtype": getattr(torch, dtype), "device": device}
    parts = [torch.randn(1, count, tokens, width, **options).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    window = WINDOW if any(layers_by_window(sizes)) else None
    about = {"scaling": width**-0.5, "sliding_window": window, **attention_kwargs(row, kind)}
    out, _ = ALL_ATTENTION_FUNCTIONS[kind](layer, *parts, None, **about)
    exact_parts = query, key, value = [part.detach().double().requires_grad_() for part in parts]
    exact = references.attention(query, key, value, row, window)
    weights = torch.randn(exact.shape, **options)
    forward = share_of_error([out], [exact])
    backward = share_of_error(
        torch.autograd.grad(out, parts, weights), torch.autograd.grad(exact, exact_parts, weights.double())
    )
    within = f"{kind} in a window of {window} tokens" if window else kind
    return judged(
        "attention",
        forward <= SHARE[dtype] and backward <= SHARE[dtype],
        f"{within}, {dtype}: error {forward:.1e} forward, {backward:.1e} backward (at most {SHARE[dtype]:g})",
        f"The attention {kind} is wrong on this device: install another version of its library (flash-attn, or torch "
        f"for flex attention and SDPA), and report it.",
        kind=kind,
        forward=forward,
        backward=backward,
    )


def check_head(sizes: Any, dtype: str, device: torch.device) -> Finding:
    """Check the head in parts, on more logits than exist at once: log-probs and gradients of its inputs."""
    vocabulary, width = sizes.vocab_size, sizes.hidden_size
    count = int(BEYOND * head.AT_ONCE / vocabulary) + 1
    torch.manual_seed(0)
    options = {"dtype": getattr(torch, dtype), "device": device}
    hidden = torch.randn(count, width, **options).requires_grad_()
    weight = (2 * torch.randn(vocabulary, width, **options) / width**0.5).requires_grad_()
    distribution = torch.arange(count, device=device)
    targets = torch.randint(0, vocabulary, (count,), device=device)
    logprobs, _ = linear_logprobs(hidden, weight, None, distribution, targets, TEMPERATURE)
    weights = torch.randn(count, device=device)
    gradients = torch.autograd.grad(logprobs @ weights, (hidden, weight))

    exact_weight = weight.detach().double().requires_grad_()
    exact, exact_hidden = [], []
    size = max(1, head.AT_ONCE // 4 // vocabulary)
    for start in range(0, count, size):  # in float64 not all logits at once either
        some = slice(start, start + size)
        states = hidden[some].detach().double().requires_grad_()
        logps = torch.log_softmax(states @ exact_weight.T / TEMPERATURE, -1).gather(1, targets[some, None])[:, 0]
        (logps @ weights[some].double()).backward()
        exact.append(logps.detach())
        exact_hidden.append(states.grad)
    gap = float((logprobs.detach().double() - torch.cat(exact)).abs().mean())
    share = share_of_error(gradients, [torch.cat(exact_hidden), exact_weight.grad])
    return judged(
        "head",
        gap <= GAP[dtype] and share <= SHARE[dtype],
        f"{count} x {vocabulary} logits, {dtype}: log-probs {gap:.1e} nats, gradients {share:.1e}",
        "Log-probs or gradients of the output layer are wrong on this device: update torch and the driver, and report "
        "it.",
        gap=gap,
        gradients=share,
    )


def check_gradient(sizes: Any, trainer: TrainerConfig, device: torch.device) -> Finding:
    """Check log-probs and the gradients of all parameters of a model of few layers, packed and in the dtype of
    training, against each sequence alone in float64."""
    dtype, kind = trainer.dtype, choose_attention(trainer.dtype)
    model = _few_layers(sizes, dtype, kind, device)
    exact_model = _few_layers(sizes, "float64", "eager", device)
    exact_model.load_state_dict(model.state_dict())
    if trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    own_head = Head(model)

    def forward(row: PackedRow) -> tuple[Tensor, Tensor]:
        outputs = {"predicts": row.predicts, "distribution": row.distribution, "targets": row.targets}
        return model(**row_inputs(row, kind), **outputs, temperature=TEMPERATURE)

    vocabulary = sizes.vocab_size
    row, flat = _row(vocabulary, SHORT_LENGTHS, SHORT_SHARED, device, prefix_tree=False)
    own_head.measure(model, **row_inputs(row, kind))
    trees = (True, False) if kind != FLASH and trainer.prefix_tree else (False,)
    apart = [tree for tree in trees if keeps_apart(forward, own_head.embeddings, vocabulary, device, prefix_tree=tree)]
    rows = [pack(flat, flat.trained(None), [n], device) for n in range(len(flat.lengths))]
    if apart:  # else the trainer packs a single sequence into each row
        row, flat = _row(vocabulary, SHORT_LENGTHS, SHORT_SHARED, device, prefix_tree=apart[0])
        rows = [row]
    weights = torch.randn(len(flat.tokens), generator=torch.Generator().manual_seed(0)).to(device)
    logprobs = torch.zeros(len(flat.tokens), device=device)
    for row in rows:
        places = torch.from_numpy(row.batch_index).to(device)
        logps, _ = forward(row)
        (logps @ weights[places]).backward()
        logprobs[places] = logps.detach()
    exact = _backward_alone(exact_model, flat, weights)
    gap = float((logprobs - exact).abs().sum() / (len(exact) - len(flat.lengths)))
    parameters = zip(model.parameters(), exact_model.parameters(), strict=True)
    pairs = [(p.grad, q.grad) for p, q in parameters if p.grad is not None and q.grad is not None]
    share = share_of_error(*zip(*pairs, strict=True))
    holds = "a prefix tree" if apart[:1] == [True] else "several sequences" if apart else "one sequence"
    return judged(
        "gradient",
        gap <= LAYERS * GAP[dtype] and share <= LAYERS * SHARE[dtype],
        f"{holds} a row, {dtype}: log-probs {gap:.1e} nats, gradients {share:.1e} (at most {LAYERS * SHARE[dtype]:g})",
        "A packed row does not have the gradients of its sequences: if the check `attention` failed too, begin with "
        "that; else update transformers to the version of pyproject.toml, and report it.",
        gap=gap,
        gradients=share,
        a_row_holds=holds,
    )


def _backward_alone(model: Any, flat: FlatBatch, weights: Tensor) -> Tensor:
    """Return the log-probs of all tokens, each sequence alone in float64, and give parameters their gradients."""
    exact = torch.zeros(len(flat.tokens), device=weights.device, dtype=torch.float64)
    start = 0
    for length in flat.lengths.tolist():
        span = slice(start + 1, start + length)
        tokens = torch.from_numpy(flat.tokens[start : start + length]).long().to(weights.device)
        logps = references.logprobs_alone(model, tokens, TEMPERATURE)
        (logps @ weights[span].double()).backward()
        exact[span] = logps.detach()
        start += length
    return exact


def _few_layers(sizes: Any, dtype: str, attention: str, device: torch.device) -> Any:
    """Return the model with two layers of each kind. The random weights are equal in every call."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(
            of_layers(sizes, 2),
            trust_remote_code=False,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            experts_implementation="eager",
        ).eval()


def _row(
    vocabulary: int, lengths: Sequence[Sequence[int]], shared: int, device: torch.device, *, prefix_tree: bool
) -> tuple[PackedRow, FlatBatch]:
    groups = random_groups(vocabulary, lengths, shared=shared)
    flat = FlatBatch.of(groups, minibatches=1, prefix_tree=prefix_tree)
    return pack(flat, flat.trained(None), range(len(flat.lengths)), device), flat
