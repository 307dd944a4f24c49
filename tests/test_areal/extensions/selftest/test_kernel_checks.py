"""The checks of kernels: green on what is right, red on planted faults."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig

from areal.config.trainer_section import TrainerConfig
from areal.extensions.selftest import kernel_checks as kernels
from areal.extensions.selftest.findings import SHARE
from areal.extensions.selftest.synthetic import TINY
from areal.training import attention, head, packed

CPU = torch.device("cpu")
SIZES = AutoConfig.for_model(**TINY)
DTYPES = ["float32", "bfloat16"]
FAULTY = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
"""What is planted is the same in both; that bfloat16 passes where it is right is checked each time."""
FAR = 3
"""How many times the tolerance an error is at least, so that no machine's rounding hides it."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Several parts of the head without millions of logits."""
    monkeypatch.setattr(head, "AT_ONCE", 1 << 18)


@pytest.fixture
def attend(monkeypatch):
    """Replace the attention for a test."""
    yield lambda wrong: monkeypatch.setattr(attention, "packed_sdpa", wrong)
    monkeypatch.undo()
    attention.choose_attention("float32")  # registers the right one again


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_that_are_right_pass(dtype):
    findings = [kernels.check_attention(SIZES, dtype, CPU), kernels.check_head(SIZES, dtype, CPU)]
    assert [(finding.result, finding.advice) for finding in findings] == [("ok", "")] * 2


@pytest.mark.parametrize(
    ("dtype", "prefix_tree"),
    [
        ("float32", True),
        pytest.param("float32", False, marks=pytest.mark.slow),
        pytest.param("bfloat16", True, marks=pytest.mark.slow),
        ("bfloat16", False),
    ],
)
def test_gradients_that_are_right_pass(dtype, prefix_tree):
    trainer = TrainerConfig(dtype=dtype, prefix_tree=prefix_tree, gradient_checkpointing=not prefix_tree)
    finding = kernels.check_gradient(SIZES, trainer, CPU)
    assert (finding.result, finding.advice) == ("ok", "")
    assert finding.values["a_row_holds"] == ("a prefix tree" if prefix_tree else "several sequences")


def sees_the_sequence_before(module, query, key, value, attention_mask, *, row, mask, **keywords):
    added = [row.added[0] + row.added[1], *row.added[2:]]
    return packed_sdpa(
        module, query, key, value, None, row=dataclasses.replace(row, added=added, lengths=added), mask=mask, **keywords
    )


def sees_the_future(module, query, key, value, attention_mask, *, row, mask, scaling=None, **keywords):
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2), None


packed_sdpa = attention.packed_sdpa


@pytest.mark.parametrize("dtype", FAULTY)
def test_an_attention_that_ignores_the_window_of_a_model_fails_by_far(attend, dtype):
    sizes = AutoConfig.for_model(**TINY, use_sliding_window=True, sliding_window=4096, max_window_layers=0)
    assert kernels.check_attention(sizes, dtype, CPU).result == "ok"
    attend(lambda *arguments, sliding_window, **keywords: packed_sdpa(*arguments, **keywords))
    findings = kernels.check_attention(sizes, dtype, CPU)
    assert findings.result == "FAILED"
    assert min(findings.values["forward"], findings.values["backward"]) > FAR * SHARE[dtype]


@pytest.mark.parametrize("wrong", [sees_the_sequence_before, sees_the_future])
@pytest.mark.parametrize("dtype", FAULTY)
def test_an_attention_with_a_wrong_mask_fails_by_far(attend, dtype, wrong):
    attend(wrong)
    findings = kernels.check_attention(SIZES, dtype, CPU)
    assert findings.result == "FAILED"
    assert min(findings.values["forward"], findings.values["backward"]) > FAR * SHARE[dtype]
    assert "packed_paths" in findings.advice


@pytest.mark.parametrize("dtype", FAULTY)
def test_a_head_that_leaves_out_its_last_part_fails(monkeypatch, dtype):
    parts = head._parts
    monkeypatch.setattr(head, "_parts", lambda *arguments: list(parts(*arguments))[:-1] or parts(*arguments))
    findings = kernels.check_head(SIZES, dtype, CPU)
    assert findings.result == "FAILED"


@pytest.mark.parametrize("dtype", FAULTY)
def test_a_row_whose_tokens_are_predicted_one_place_off_fails(monkeypatch, dtype):
    def packs(*arguments):
        row = packed.pack(*arguments)
        row.predicts = row.predicts + 1
        return row

    monkeypatch.setattr(kernels, "pack", packs)
    findings = kernels.check_gradient(SIZES, TrainerConfig(dtype=dtype, prefix_tree=False), CPU)
    assert findings.result == "FAILED"
    assert findings.values["gradients"] > FAR * SHARE[dtype]
