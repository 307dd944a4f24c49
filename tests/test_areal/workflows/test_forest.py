"""All calls of a sample, as prefix trees: each sampled token once, in the context in which it was sampled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.samples.table import Generation
from areal.workflows.forest import Forest

PROMPT = [1, 2]


def said(*tokens: int, number: int = 0, finish: str = "stop") -> Generation:
    """Its log-probs tell which call and which token they belong to."""
    n = len(tokens)
    logprobs = -(number + np.arange(1, n + 1, dtype=np.float32) / 64)
    return Generation(np.array(tokens, np.int32), logprobs, np.full(n, number, np.int32), finish)


def forest_of(*calls: tuple[list[int], list[int]]) -> Forest:
    forest = Forest()
    for number, (prompt, tokens) in enumerate(calls):
        forest.add(np.array(prompt, np.int32), said(*tokens, number=number))
    return forest


def test_a_conversation_that_only_grows_has_no_branches():
    forest = forest_of((PROMPT, [3, 4]), ([*PROMPT, 3, 4, 5], [6]), ([*PROMPT, 3, 4, 5, 6], [7]))
    trajectory = forest.trajectory(1.0, "sample", 1.0)
    assert (trajectory.branches, trajectory.returns, trajectory.reward, trajectory.finish) == ((), None, 1.0, "stop")
    assert trajectory.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert trajectory.versions.tolist() == [-1, -1, 0, 0, -1, 1, 2]


def test_the_same_prompt_asked_twice_is_shared_and_equal_answers_are_not():
    trajectory = forest_of((PROMPT, [3, 4]), (PROMPT, [3, 4])).trajectory(1.0, "sample", 1.0)
    assert trajectory.tokens.tolist() == [1, 2, 3, 4, 3, 4]
    assert trajectory.branches == ((0, 4), (2, 2))
    assert trajectory.versions.tolist() == [-1, -1, 0, 0, 1, 1]


def test_branches_that_leave_a_path_later_come_first():
    forest = forest_of((PROMPT, [3, 4, 5, 6]), ([1, 2, 3, 9], [8]), ([1, 2, 3, 4, 5, 9], [8]), ([7], [7]))
    trajectory = forest.trajectory(1.0, "sample", 1.0)
    assert trajectory.branches == ((0, 6), (5, 2), (3, 2), (0, 2))
    paths = [sequence.tokens.tolist() for sequence in trajectory.sequences()]
    assert paths == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9, 8], [1, 2, 3, 9, 8], [7, 7]]
    assert forest.places() == [0, 2, 1, 3]


def test_calls_may_be_credited_each_with_a_reward_of_its_own_or_left_out_of_training():
    forest = forest_of((PROMPT, [3, 4]), ([1, 2, 3, 4, 5], [6]), ([7], [8]), ([1, 2, 3, 4, 5, 6], [9]))
    first, second, third, _ = forest.calls
    forest.credit(first, 0.25, "solver")
    forest.credit(second, None, "user")
    forest.credit(third, 0.75, "critic")
    sample = forest.trajectory(0.5, "sample", 1.0)
    assert (sample.reward, sample.branches) == (0.5, ((0, 7), (0, 2)))
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6, 9, 7, 8]
    assert sample.versions.tolist() == [-1, -1, 0, 0, -1, -1, 3, -1, 2]
    assert sample.returns[sample.sampled].tolist() == [0.25, 0.25, 0.5, 0.75]
    solver, none, critic = (sample.agents[place] for place in (2, 6, 8))
    assert sample.agents.tolist() == [0, 0, solver, solver, 0, 0, none, 0, critic] and len({solver, critic, 0}) == 3
    forest.credits = dict.fromkeys(range(4))
    with pytest.raises(ValueError, match="nothing was sampled"):
        forest.trajectory(0.5, "sample", 1.0)


def test_an_answer_without_tokens_counts_for_nothing():
    forest = forest_of((PROMPT, [3]), ([5, 6], []))
    assert forest.trajectory(0.0, "sample", 1.0).tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="does not have"):
        forest.reward(said(), 1.0)
    with pytest.raises(ValueError, match="nothing was sampled"):
        forest_of((PROMPT, [])).trajectory(1.0, "sample", 1.0)
    with pytest.raises(ValueError, match="has a reward"):
        forest.trajectory(None, "sample", 1.0)


@pytest.mark.parametrize(
    ("credit", "discount", "given_", "expected"),
    [
        ("sample", 0.5, {0: 1.0, 2: 4.0}, None),
        ("call", 0.5, {0: 1.0, 2: 4.0}, [9.0, 8.0, 12.0]),
        ("return_to_go", 1.0, {0: 1.0, 2: 4.0}, [13.0, 12.0, 12.0]),
        ("return_to_go", 0.5, {0: 1.0, 2: 4.0}, [4.0, 6.0, 12.0]),
        ("return_to_go", 1.0, {}, None),
    ],
)
def test_what_each_call_is_credited_with(credit, discount, given_, expected):
    forest = forest_of((PROMPT, [3, 4]), ([5], [6]), ([*PROMPT, 3, 4, 9], [6, 7, 8]))
    for call, value in given_.items():
        forest.reward(forest.calls[call], value)
    trajectory = forest.trajectory(8.0, credit, discount)
    assert trajectory.reward == 8.0 + sum(given_.values())
    if expected is None:
        assert trajectory.returns is None
        return
    for call, credited in enumerate(expected):
        assert trajectory.returns[trajectory.versions == call].tolist() == [credited] * len(forest.calls[call].tokens)


@st.composite
def histories(draw):
    """Calls of an agent that goes on from any point of any earlier call, or begins anew. Few tokens, so that much is
    alike by chance too."""
    token = st.integers(0, 2)
    instances: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 8))):
        value_before = draw(st.sampled_from([[], *(prompt + tokens for prompt, tokens in instances)]))
        stored = value_before[: draw(st.integers(0, len(value_before)))] if draw(st.booleans()) else value_before
        prompt = stored + draw(st.lists(token, min_size=0 if stored else 1, max_size=3))
        instances.append((prompt, draw(st.lists(token, max_size=4))))
    return instances


@settings(max_examples=5 * settings.default.max_examples)
@given(calls=histories(), data=st.data())
def test_each_sampled_token_is_there_once_after_exactly_what_it_was_sampled_from(calls, data):
    sampled = [call for call in calls if call[1]]
    forest = forest_of(*calls)
    if not sampled:
        return
    number = iter([i for i, call in enumerate(calls) if call[1]])
    values = data.draw(st.lists(st.integers(-4, 4), min_size=len(sampled), max_size=len(sampled)))
    for call, value in zip(forest.calls, values, strict=True):
        forest.reward(call, value)
    trajectory = forest.trajectory(0.0, "call", 1.0)
    results = {}
    for sequence in trajectory.sequences():
        for place in np.flatnonzero(sequence.sampled):
            key = float(sequence.logprobs[place])
            assert key not in results, "a token is trained twice"
            version = int(sequence.versions[place])
            credited = trajectory.reward if sequence.returns is None else sequence.returns[place]
            results[key] = (version, sequence.tokens[: place + 1].tolist(), credited)
    expected = {}
    for i, (prompt, tokens) in zip(number, sampled, strict=True):
        for k in range(len(tokens)):
            value = values[len([n for n in range(i) if calls[n][1]])]
            expected[float(np.float32(-(i + np.float32(k + 1) / 64)))] = (i, prompt + tokens[: k + 1], value)
    if trajectory.returns is None:
        assert len(set(values)) == 1 or sum(values) == values[0]
        expected = {key: (*item[:2], trajectory.reward) for key, item in expected.items()}
    assert results == expected


@given(calls=histories())
def test_a_prefix_of_an_earlier_call_is_stored_once(calls):
    forest = forest_of(*calls)
    if not forest.calls:
        return
    trajectory = forest.trajectory(1.0, "sample", 1.0)
    prompts = {tuple(prompt[:n]) for prompt, tokens in calls if tokens for n in range(1, len(prompt) + 1)}
    # No more tokens than one for each distinct prefix of a prompt, and one for each sampled token.
    assert len(trajectory.tokens) <= len(prompts) + sum(len(tokens) for _, tokens in calls)
