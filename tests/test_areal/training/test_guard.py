"""The guard says when a run has gone wrong, and not before."""

from __future__ import annotations

import json
import math

import pytest
from support.small_runs import ten_steps

from areal.config.trainer_section import GuardConfig
from areal.training.guard import Guard, limits_of

SOUND = {
    "loss": -0.01,
    "grad_norm": 0.7,
    "entropy": 1.2,
    "effective_sample_size": 0.8,
    "logprob_gap": 1e-4,
    "kl_reference": None,
}


def guard(**limits: float) -> Guard:
    return Guard(GuardConfig(**{"patience": 3, "logprob_gap": 0.5, **limits}))


def verdicts(guard: Guard, name: str, values: list[float | None]) -> list[str | None]:
    return [guard.check(SOUND | {name: value}) for value in values]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "entropy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stops_the_run_at_once(name, value):
    assert guard().check(SOUND) is None
    assert guard().check(SOUND | {name: value}).startswith(f"{name} is {value}: lower trainer.lr")


def test_a_loss_of_the_users_own_that_is_not_finite_is_told_as_such():
    guard_of_user = Guard(GuardConfig(), "mine.py:loss")
    assert "look into the objective mine.py:loss for a division by 0" in guard_of_user.check(SOUND | {"loss": math.nan})
    assert "lower trainer.lr" in guard_of_user.check(SOUND | {"loss": math.nan, "entropy": math.nan})


@pytest.mark.parametrize(
    ("name", "limit", "bad", "side"),
    [
        ("effective_sample_size", 0.1, 0.04, "below"),
        ("advantage_max", 1000, 5e5, "above"),
        ("effective_sample_size", 0.1, math.nan, "below"),
        ("entropy", 0.3, 0.2, "below"),
        ("logprob_gap", 0.5, 0.7, "above"),
        ("logprob_gap", 0.5, math.inf, "above"),
    ],
)
def test_a_limit_broken_for_patience_steps_in_a_row_stops_the_run(name, limit, bad, side):
    first, second, third = verdicts(guard(**{name: limit}), name, [bad, bad, bad])
    assert first is second is None
    assert third.startswith(f"{name} is {bad:.3g}, for 3 steps in a row {side} guard.{name} = {limit:g}: ")
    assert third.endswith(".") and "\n" not in third


def test_a_value_at_the_limit_is_sound():
    limits = guard(effective_sample_size=0.1, logprob_gap=0.5, entropy=0.3, patience=1)
    assert limits.check({"effective_sample_size": 0.1, "logprob_gap": 0.5, "entropy": 0.3}) is None
    assert not limits.suspicious


def test_a_sound_step_ends_a_streak():
    tested_guard = guard()
    assert verdicts(tested_guard, "effective_sample_size", [0.04, 0.04, 0.5, 0.04, 0.04]) == [None] * 5
    assert tested_guard.suspicious
    assert tested_guard.check(SOUND) is None
    assert not tested_guard.suspicious


def test_streaks_of_different_metrics_do_not_add_up():
    tested_guard = guard()
    for name, bad in (("effective_sample_size", 0.04), ("logprob_gap", 0.7), ("effective_sample_size", 0.04)):
        assert tested_guard.check(SOUND | {name: bad}) is None
    assert tested_guard.suspicious


@pytest.mark.parametrize("unmeasured", [{}, {"logprob_gap": None}])
def test_a_step_that_did_not_measure_a_metric_neither_ends_nor_lengthens_a_streak(unmeasured):
    tested_guard = guard()
    assert tested_guard.check({"logprob_gap": 0.7}) is tested_guard.check({"logprob_gap": 0.7}) is None
    assert tested_guard.check(unmeasured) is None
    assert tested_guard.suspicious
    assert tested_guard.check({"logprob_gap": 0.7}) is not None


def test_an_entropy_limit_of_zero_is_off():
    assert verdicts(guard(), "entropy", [0.0] * 9) == [None] * 9


def test_metrics_that_are_not_there_are_not_checked():
    assert guard(patience=1).check({}) is None


def test_a_step_in_which_all_tokens_were_masked_neither_ends_nor_lengthens_a_streak():
    tested_guard = guard()
    nothing = {"tokens_trained": 0, "effective_sample_size": 0.0, "entropy": 0.0, "loss": 0.0}
    assert [tested_guard.check(nothing) for _ in range(9)] == [None] * 9
    assert not tested_guard.suspicious
    assert "grad_norm is nan" in tested_guard.check(nothing | {"grad_norm": float("nan")})


@pytest.fixture
def model(tmp_path):
    """Makes a folder with a config.json, which is all that is read."""

    def model(**sizes):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"], **sizes}))
        return tmp_path

    return model


@pytest.mark.parametrize(
    ("changes", "experts", "limit"),
    [
        ({}, None, 1e-3),
        ({"generator": {"dtype": "bfloat16"}}, None, 0.05),
        ({"trainer": {"dtype": "bfloat16"}}, None, 0.05),
        ({"generator": {"dtype": "float16"}}, None, 0.02),
        ({"generator": {"dtype": "bfloat16"}}, 8, 0.2),
        ({}, 8, 1e-3),
        ({"trainer": {"routing": "replay"}}, 8, 0.2),
        ({"generator": {"kv_on_update": "keep"}}, None, 0.5),
        ({"generator": {"engine_options": {"kv_cache_dtype": "fp8"}}}, None, 0.5),
        ({"sampling": {"top_p": 0.9}, "trainer": {"objective": "grpo", "behaviour_weight": "none"}}, None, 0.5),
        ({"guard": {"logprob_gap": 0.3}, "generator": {"kv_on_update": "keep"}}, None, 0.3),
    ],
)
def test_the_limit_of_the_gap_is_what_dtypes_and_settings_explain(model, changes, experts, limit):
    folder = model(text_config={"num_experts": experts})
    changes |= {"sampling": {"max_new_tokens": 8} | changes.pop("sampling", {})}
    assert limits_of(ten_steps(model=str(folder), batch_size=4, **changes), cuda=False).logprob_gap == limit


@pytest.mark.parametrize(("dtype", "limit"), [("auto", 0.05), ("float32", 0.01)])
def test_on_gpus_the_limit_of_the_gap_has_room_for_their_products(model, dtype, limit):
    config = ten_steps(model=str(model()), generator={"dtype": dtype}, trainer={"dtype": dtype, "minibatches": 1})
    assert limits_of(config, cuda=True).logprob_gap == limit


def test_engines_that_compute_the_first_weights_otherwise_end_the_run_at_its_first_step(model):
    folder = model()
    assert (
        guard().check_first({"logprob_gap": None}, folder) is guard().check_first({"logprob_gap": 0.5}, folder) is None
    )
    for gap in (0.6, math.nan):
        verdict = guard().check_first({"logprob_gap": gap}, folder)
        assert "guard.logprob_gap allows 0.5: vLLM computes DeepseekV3ForCausalLM otherwise than the trainer" in verdict
