import asyncio
import json
import math
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from support.small_runs import ten_steps

from areal.base import extensions
from areal.base.errors import UserError
from areal.config.data_section import DataConfig
from areal.config.scoring import RewardConfig, ScoringConfig
from areal.data.sources import open_source
from areal.extensions.environments import reasoning_tasks
from areal.rewards.functions import Result, RewardError, as_result, as_score, combined, mean_parts, overlong_penalty
from areal.rewards.lookup import check, check_groups, find, resolve, with_groups


def test_exact_match_takes_the_completion_or_its_last_line():
    reward = resolve("exact_match").function
    assert reward("", " Paris\n", {"answer": "Paris"}) == 1.0
    assert reward("", "Let me think.\nParis ", {"answer": "Paris"}) == 1.0
    assert reward("", "Paris\nLyon", {"answer": "Paris"}) == 0.0
    assert [reward("", text, {"answer": ["Paris", 75]}) for text in ("75", "Paris", "Lyon")] == [1.0, 1.0, 0.0]


def test_addition_scores_its_own_rows():
    row = open_source(DataConfig(source="addition", eval_size=0), seed=0).row(0)
    assert resolve("addition").function(row.prompt, "a1", row.fields) == 0.0


@pytest.mark.parametrize(
    "task", ["leg_counting", "arc_1d", "rearc", "knights_knaves", "sudoku", "countdown", "gsm_symbolic"]
)
def test_reasoning_gym_gives_its_own_answer_full_marks(task):
    row = open_source(DataConfig(source=f"reasoning_gym:{task}", eval_size=0), seed=0).row(3)
    reward = resolve("reasoning_gym").function
    assert reward(row.prompt, f"<answer>wrong</answer> no: <answer>\n{row.answer}\n</answer> done", row.fields) == 1.0
    assert reward(row.prompt, row.answer, row.fields) == 1.0
    assert reward(row.prompt, "<answer>nonsense</answer>", row.fields) < 1.0


def test_a_composite_of_tasks_is_scored_by_the_right_one():
    parts = [{"name": name, "weight": 1.0, "config": {}} for name in ("leg_counting", "gcd")]
    config = DataConfig(source="reasoning_gym:composite", options={"datasets": parts}, eval_size=0)
    reward, source = resolve("reasoning_gym").function, open_source(config, seed=0)
    for row in map(source.row, range(8)):
        assert reward(row.prompt, row.answer, row.fields) == 1.0


def test_an_answer_that_its_scorer_stumbles_over_scores_zero():
    row = open_source(DataConfig(source="reasoning_gym:prime_factorization", eval_size=0), seed=0).row(0)
    assert resolve("reasoning_gym").function(row.prompt, "no number", row.fields) == 0.0


@pytest.mark.parametrize("task", reasoning_tasks.EVALUATING)
def test_no_scorer_runs_what_the_model_wrote(task, tmp_path):
    row = open_source(DataConfig(source=f"reasoning_gym:{task}", eval_size=0), seed=0).row(0)
    trace = tmp_path / "ran"
    assert resolve("reasoning_gym").function(row.prompt, f"open({str(trace)!r}, 'w')", row.fields) < 0.1
    assert not trace.exists()


def test_reasoning_gym_needs_a_row_of_its_own():
    with pytest.raises(RewardError, match="no entry of reasoning_gym"):
        resolve("reasoning_gym").function("", "1", {"answer": "1"})


OWN = """
import dataclasses

value = 3

def short(prompt, completion, row):
    return 1 / (1 + len(completion))

def counts(prompt, completion, row, *, tokens):
    return len(tokens)

class Judge:
    deterministic = False

    def __init__(self, strict, model="small"):
        self.strict, self.model = strict, model
        if strict == "never":
            raise OSError("no such server")

    async def score(self, prompt, completion, row, tokens):
        return float(self.strict)

class NoJudge:
    pass

def longest(prompt, completions, rows):
    return [len(text) / row["scale"] for text, row in zip(completions, rows, strict=True)]

class Ranks:
    async def group_score(self, prompt, completions, rows):
        return completions

def for_more(prompt, completions, rows, tokenizer):
    return []

def nothing():
    return 1.0

def turned(completion, prompt, row):
    return float(row["answer"] in completion)

class Turned:
    def group_score(self, completions, prompt, rows):
        return []

def yields(prompt, completion, row):
    yield 1.0

def hasty(prompt, completion):
    return 1.0

class Hasty:
    def score(self, completion):
        return 1.0
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module and a file of the user's, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_reward_module.py").write_text(OWN)
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "json.py").write_text(OWN)
    (tmp_path / "rewards" / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    yield tmp_path
    sys.modules.pop("own_reward_module", None)


@pytest.mark.parametrize("where", ["own_reward_module", "rewards/json.py"])
def test_a_reward_is_named_by_its_module_or_its_file(user_module, where):
    assert resolve(f"{where}:short").function("", "abc", {}) == 0.25
    assert json.dumps({}) == "{}"  # a file hides no module of its name


def test_a_reward_is_named_by_the_entry_point_of_an_installed_package(user_module, monkeypatch):
    monkeypatch.syspath_prepend(user_module)
    about = user_module / "nice_rewards-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: nice-rewards\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[areal.extensions]\nreward.brief = own_reward_module:short\n")
    monkeypatch.setattr(extensions, "installed_entries", extensions.installed_entries.__wrapped__)
    assert resolve("brief").function("", "abc", {}) == 0.25
    with pytest.raises(UserError, match="name one of exact_match, .*, brief, or your own"):
        resolve("breif")


def test_a_class_is_made_once_with_its_options(user_module):
    judge = resolve("own_reward_module:Judge", {"strict": True})
    assert (judge.takes_tokens, judge.deterministic) == (True, False)
    assert asyncio.run(judge.call("", [""], {}, [])) == 1.0


def test_what_a_function_takes_is_seen(user_module):
    assert resolve("own_reward_module:counts").takes_tokens
    plain = resolve("own_reward_module:short")
    assert (plain.takes_tokens, plain.deterministic) == (False, True)


def test_a_reward_of_groups_is_known_by_its_parameters_and_gets_all_completions(user_module):
    longest, ranks = resolve("rewards/json.py:longest"), resolve("own_reward_module:Ranks")
    assert longest.groups and ranks.groups and ranks.concurrent and not resolve("own_reward_module:short").groups
    assert longest.results(longest.call("p", ["a", "bcd"], {"scale": 2}), "ab") == [Result(0.5, {}), Result(1.5, {})]
    assert asyncio.run(ranks.call("p", ["a", "b"], {})) == ["a", "b"]
    bad = [("ab", "of type str"), (1.0, "of type float, not a list"), ([1.0], "1 scores for 2"), ([1, math.inf], "inf")]
    for value, why in bad:
        with pytest.raises(RewardError, match=why):
            longest.results(value, ["a", "b"])


def test_a_start_knows_which_of_its_rewards_score_groups(user_module):
    names = ["own_reward_module:short", "own_reward_module:longest", "theirs", "group_judge"]
    config = ScoringConfig(reward={"functions": names, "external": ["theirs"], "groups": ["theirs", names[0]]})
    assert with_groups(config).reward.groups == ["own_reward_module:longest", "group_judge", "theirs"]
    scorers, options = {"big": {"model": "m", "kind": "judge"}}, {"url": "scorer:big"}
    reward = {"options": {"judge": options, "group_judge/strict": options}}
    judged = ten_steps(scorers=scorers, reward={"functions": "judge", **reward})
    assert with_groups(judged).reward.groups == ["group_judge/strict"]
    with pytest.raises(UserError, match="scores all completions of a group at once, but .* of the run lacks it"):
        check_groups({"x": resolve("own_reward_module:longest")}, RewardConfig(functions="x"))
    with pytest.raises(UserError, match="does not score all completions .* of the run has it"):
        check_groups({"x": resolve("own_reward_module:short")}, RewardConfig(functions="x", groups=["x"]))


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("maths", {}, "there is no reward 'maths': name one of exact_match, addition, .*math, .*code"),
        ("own_reward_module:shrt", {}, "has no shrt: did you mean short"),
        ("own_reward_module:value", {}, "is of type int: name a function, or a class"),
        ("own_reward_module:NoJudge", {}, "is a class without a method score: name"),
        ("own_reward_module:hasty", {}, "too many positional arguments: it is called with prompt, completion and row"),
        ("own_reward_module:Hasty", {}, "too many positional arguments: it is called with prompt, completion and row"),
        ("own_reward_module:for_more", {}, "'tokenizer': it is called with prompt, completions and rows"),
        (
            "own_reward_module:nothing",
            {},
            "too many positional arguments: it is called with prompt, completion and row",
        ),
        ("own_reward_module:turned", {}, "is called with prompt, completion and row, in this order"),
        ("own_reward_module:Turned", {}, "is called with prompt, completions and rows, in this order"),
        ("own_reward_module:yields", {}, "yields: have it return its score"),
        ("rewards/leaves.py:short", {}, "failed with SystemExit: 3"),
        ("own_missing:short", {}, "ModuleNotFoundError: No module named 'own_missing'"),
        ("rewards/nothing.py:short", {}, "there is no file .*/rewards/nothing.py: correct the path"),
        ("own_reward_module:short", {"x": 1}, "has options .*, but is a function"),
        ("own_reward_module:Judge", {}, "required argument: 'strict': its options are strict, model; correct"),
        ("own_reward_module:Judge", {"strict": 1, "modl": 2}, "'modl': its options are strict, model; correct"),
    ],
)
def test_a_name_that_names_no_reward_is_told(user_module, name, options, sentence):
    with pytest.raises(UserError, match=sentence):
        check(name, options)


def test_a_class_that_cannot_be_made_says_why(user_module):
    with pytest.raises(UserError, match="could not be made with the options strict: OSError: no such server"):
        resolve("own_reward_module:Judge", {"strict": "never"})
    with pytest.raises(UserError, match="reward 'judge': samples is 'x' in its options, but should be a valid integer"):
        resolve("judge", {"url": "http://127.0.0.1:1", "samples": "x", "api_key": "secret"})


def test_all_that_is_built_in_can_be_called():
    assert all(callable(find(name)) for name in extensions.names("reward"))


def test_a_result_is_a_score_and_those_of_its_parts():
    assert as_result(1) == Result(1.0, {})
    assert as_result((0.5, {"format": True, "answer": 0})) == Result(0.5, {"format": 1.0, "answer": 0.0})
    for value in ((1.0, {"format": math.nan}), (1.0, 2.0), (math.inf, {}), (1.0, {}, 2)):
        with pytest.raises(RewardError):
            as_result(value)


def test_several_rewards_count_by_their_weights_and_show_as_parts():
    form, answer = Result(1.0, {"tags": 0.5}), Result(0.25, {})
    combination = combined({"form": 0.25, "answer": 2.0}, {"form": form, "answer": answer})
    assert combination == Result(0.75, {"form/tags": 0.5, "form": 1.0, "answer": 0.25})
    assert combined({"form": 2.0}, {"form": form}) == Result(2.0, {"form/tags": 0.5})


def test_the_mean_of_a_part_is_over_those_that_have_it():
    assert mean_parts([{"a": 1.0, "b": 0.0}, {"a": 0.0}, {}]) == {"a": 0.5, "b": 0.0}


def test_only_finite_numbers_are_scores():
    assert [as_score(value) for value in (True, 2, 0.5, Fraction(1, 4))] == [1.0, 2.0, 0.5, 0.25]
    assert [as_score(value) for value in (np.bool_(True), np.array(0.5), Decimal("0.25"))] == [1.0, 0.5, 0.25]
    for value in (math.nan, math.inf, 1e30, -2e9, None, "1", 10**400, np.array([0.5, 1.0])):
        with pytest.raises(RewardError):
            as_score(value)


def test_an_overlong_completion_loses_its_reward_linearly_over_the_buffer():
    lengths = (1, 60, 61, 70, 79, 80, 200)
    assert [overlong_penalty(n, 80, 20) for n in lengths] == [0, 0, 0.05, 0.5, 0.95, 1, 1]


def test_without_a_buffer_no_length_costs_anything():
    assert [overlong_penalty(n, 80, 0) for n in (1, 80, 200)] == [0, 0, 0]


def test_a_reward_for_trl_is_refused(tmp_path):
    (file := tmp_path / "for_trl.py").write_text("def score(prompts, completions, answer, **others): ...")
    with pytest.raises(UserError, match="takes lists, as rewards of TRL do"):
        check(f"{file}:score")
