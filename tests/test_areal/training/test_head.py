"""Log-probs and entropies from hidden states, against log_softmax of whole logits in float64."""

import math

import pytest
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from areal.base.errors import UserError
from areal.cpu.processor import avoid_broken_amx
from areal.training import head
from areal.training.head import Head, linear_logprobs
from areal.training.logit_curve import LogitCurve

CURVES = [LogitCurve(), LogitCurve(scale=0.25), LogitCurve(cap=3.0), LogitCurve(scale=2.0, cap=5.0)]
TEMPERATURE = 0.7

avoid_broken_amx()


def make(U=50, V=37, H=11, S=70, seed=0):
    torch.manual_seed(seed)
    hidden, weight, bias = torch.randn(U, H), torch.randn(V, H), torch.randn(V)
    return [t.requires_grad_() for t in (hidden, weight, bias)], torch.randint(0, U, (S,)), torch.randint(0, V, (S,))


def of_whole_logits(hidden, weight, bias, distribution, targets, curve):
    logits = curve.scale * linear(hidden, weight, bias)
    logits = logits if curve.cap == math.inf else curve.cap * torch.tanh(logits / curve.cap)
    logps = torch.log_softmax(logits / TEMPERATURE, -1)
    return logps[distribution, targets], -(logps.exp() * logps).sum(-1)[distribution]


@pytest.mark.parametrize("at_once", [1, 500, 1 << 20])
@pytest.mark.parametrize("curve", CURVES)
def test_in_parts_of_any_size_values_and_gradients_are_those_of_whole_logits(monkeypatch, at_once, curve):
    monkeypatch.setattr(head, "AT_ONCE", at_once)
    parts, distribution, targets = make()
    weights = torch.randn(len(targets))
    computed = linear_logprobs(*parts, distribution, targets, TEMPERATURE, curve)
    exact = [p.detach().double().requires_grad_() for p in parts]
    expected = of_whole_logits(*exact, distribution, targets, curve)
    for first, second in zip(computed, expected, strict=True):
        torch.testing.assert_close(first.double(), second, rtol=1e-5, atol=1e-5)
    extra = torch.randn(len(targets))
    for of_logps, of_entropies in ((weights, None), (weights, extra), (None, extra)):
        used = [(i, w) for i, w in enumerate((of_logps, of_entropies)) if w is not None]
        for first, second in zip(
            torch.autograd.grad(sum(computed[i] @ w for i, w in used), parts, retain_graph=True),
            torch.autograd.grad(sum(expected[i] @ w.double() for i, w in used), exact, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(first.double(), second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("curve", CURVES)
def test_without_gradients_there_are_the_same_log_probs_and_no_entropies(curve):
    parts, distribution, targets = make()
    with torch.no_grad():
        logp, entropy = linear_logprobs(*parts, distribution, targets, TEMPERATURE, curve)
    assert torch.equal(logp, linear_logprobs(*parts, distribution, targets, TEMPERATURE, curve)[0])
    assert entropy.isnan().all()


def test_without_tokens_there_is_a_gradient_of_zeros():
    (hidden, weight, _), none, _ = make(S=0)
    logp, entropy = linear_logprobs(hidden[:0], weight, None, none, none, 1.0)
    assert logp.shape == entropy.shape == (0,)
    assert not torch.autograd.grad(logp.sum(), weight)[0].any()


def test_a_frozen_head_gets_no_gradient():
    (hidden, weight, bias), distribution, targets = make()
    linear_logprobs(hidden, weight.detach(), bias, distribution, targets, 1.0)[0].sum().backward()
    assert hidden.grad.any()
    assert weight.grad is None


# --- bf16


def errors(of, hidden, weight, distribution, targets, g):
    """Relative errors, against float64 on the same bf16 logits, of the gradients of hidden states and head."""
    parts = [t.clone().requires_grad_() for t in (hidden, weight)]
    gradients = torch.autograd.grad(of(*parts, distribution, targets), parts, g)
    logits = linear(hidden, weight).double() / TEMPERATURE  # the very products that the bf16 head gives
    sums = torch.zeros(len(hidden), dtype=torch.float64).index_add_(0, distribution, g.double())
    d = -torch.softmax(logits, -1) * sums[:, None]
    d.index_put_((distribution, targets), g.double(), accumulate=True)
    d /= TEMPERATURE
    exact = d @ weight.double(), d.T @ hidden.double()
    return [((f.double() - e).norm() / e.norm()).item() for f, e in zip(gradients, exact, strict=True)]


def ours(hidden, weight, distribution, targets):
    return linear_logprobs(hidden, weight, None, distribution, targets, TEMPERATURE)[0]


def log_softmax(hidden, weight, distribution, targets):
    return torch.log_softmax(linear(hidden, weight).float() / TEMPERATURE, -1)[distribution, targets]


def likely(p, U=64, V=501, H=64):
    """Hidden states, a head and targets in bf16, where each target's probability is about p (a tensor [U])."""
    torch.manual_seed(1)
    targets = torch.randint(0, V, (U,))
    hidden, weight = torch.randn(U, H), 0.3 * torch.randn(V, H) / H**0.5
    for _ in range(60):  # push each row towards its target until its odds are right
        logits = linear(hidden.bfloat16(), weight.bfloat16()).float() / TEMPERATURE
        gap = torch.logit(p) - torch.logit(torch.softmax(logits, -1)[torch.arange(U), targets].clamp(1e-7, 1 - 1e-7))
        direction = weight[targets]
        hidden += TEMPERATURE * gap[:, None] * direction / direction.square().sum(-1, keepdim=True)
    return hidden.bfloat16(), weight.bfloat16(), targets


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.99, 0.999, 0.9999, "mixed"])
def test_in_bf16_gradients_are_as_good_as_log_softmax_in_fp32_on_the_same_logits(p):
    expected = torch.linspace(-2, 9, 64).sigmoid() if p == "mixed" else torch.full((64,), p)
    hidden, weight, targets = likely(expected)
    place = torch.arange(64)
    g = torch.randn(64)
    logps = ours(hidden, weight, place, targets)
    assert (logps.exp().log() - expected.log()).abs().max() < 0.7 * (1 - expected).max() + 0.1
    results = [errors(of, hidden, weight, place, targets, g) for of in (ours, log_softmax)]
    for mine, their_values in zip(*results, strict=True):
        assert mine < 1.1 * their_values + 1e-4
        assert mine < 0.02


# --- memory


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that an operation returns."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.nbytes)
        return out


def test_no_tensor_is_larger_than_a_part_of_the_logits(monkeypatch):
    monkeypatch.setattr(head, "AT_ONCE", 4096)
    (hidden, weight, _), distribution, targets = make(U=400, V=900, H=8, S=500)
    with Largest() as seen:
        linear_logprobs(hidden, weight, None, distribution, targets, 1.0)[0].sum().backward()
    assert seen.bytes <= 2 * 4096 * 4 < 400 * 900 * 4 / 40
    assert weight.grad.any()


# --- models


def tiny(name, **changes):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        pad_token_id=0,
        **changes,
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Gemma2", {"final_logit_softcapping": 3.0}),
        ("Granite", {"logits_scaling": 7.0}),
        ("Cohere", {"logit_scale": 0.0625}),
    ],
)
def test_what_a_model_does_to_its_logits_is_found_out(name, changes):
    model = tiny(name, **changes)
    tokens = torch.randint(0, 37, (1, 9))
    logps = torch.log_softmax(model(tokens).logits[0, :-1] / TEMPERATURE, -1)
    expected = logps.gather(1, tokens[0, 1:, None])[:, 0]
    weights = torch.randn(8)
    gradients = torch.autograd.grad(expected @ weights, list(model.parameters()), allow_unused=True)
    place = torch.arange(8)
    own_head = Head(model)
    own_head.measure(model, input_ids=tokens)
    result, entropy = model(
        input_ids=tokens, predicts=place, distribution=place, targets=tokens[0, 1:], temperature=TEMPERATURE
    )
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(logps.exp() * logps).sum(-1), rtol=1e-5, atol=1e-5)
    again = torch.autograd.grad(result @ weights, list(model.parameters()), allow_unused=True)
    for first, second in zip(again, gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


class Odd(torch.nn.Module):
    """Its logits lose their sign."""

    def __init__(self, head):
        super().__init__()
        self.lm_head = head

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, hidden):
        from types import SimpleNamespace

        return SimpleNamespace(logits=self.lm_head(hidden).abs())


def test_a_model_that_changes_its_logits_in_another_way_is_refused():
    model = Odd(torch.nn.Linear(4, 9))
    with pytest.raises(UserError, match="Odd cannot be trained: it changes its logits"):
        Head(model).measure(model, hidden=torch.zeros(1, 1, 4))


def test_a_head_that_is_not_a_linear_layer_is_refused():
    with pytest.raises(UserError, match=r"Odd cannot be trained: its output layer is of type Bilinear"):
        Head(Odd(torch.nn.Bilinear(4, 4, 9)))
