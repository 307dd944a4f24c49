"""Samplers: which rows they choose from what the prompts before have shown."""

import json
from collections import Counter
from itertools import islice

import pytest

from areal.config import DataConfig, RowsConfig, UserError
from areal.data import samplers
from areal.data.history import History
from areal.data.samplers import open_sampler
from areal.data.sources import open_source

SIZE = 40
SIZES = ((30, 2), (10, 9))  # and digits


def addition(size=SIZE, **options):
    return open_source(DataConfig(source="addition", size=size, eval_size=0, options=options), seed=0)


def two_sources():
    parts = [
        {"source": "addition", "size": size, "options": {"min_digits": d, "max_digits": d}}
        for size, d in ((30, 2), (10, 9))
    ]
    return open_source(RowsConfig(sources=parts, eval_size=0), seed=0)


def run(choose, source, prompts, rate_of, group_size=8, history=None, late=6, sees=None):
    """The training indices of the prompts. rate_of: the mean reward of a prompt of this key. late: how many prompts are
    chosen before the group of one is finished."""
    history = history or History(source, 0, group_size, prompts)
    chosen = []
    for prompt in range(prompts):
        chosen.append(choose(history, prompt))
        history.chosen(prompt, chosen[-1])
        if sees is not None:
            sees.append(history.coverage())
        if prompt >= late:
            mean = rate_of(source.key(chosen[prompt - late]), prompt)
            history.finished(chosen[prompt - late], mean, (mean * (1 - mean)) ** 0.5, 0 < mean < 1, prompt // 4, 10)
    return chosen


def refused(words, source, **data):
    with pytest.raises(UserError, match=words):
        open_sampler(DataConfig(source="addition", eval_size=0, **data), source)


def test_shuffle_takes_the_rows_in_the_order_of_the_data():
    choose = open_sampler(DataConfig(source="addition"), addition())
    assert run(choose, addition(), 100, lambda key, prompt: 1.0) == list(range(100))


def test_a_key_names_the_same_row_in_every_epoch():
    for source in (addition(), two_sources()):
        rows = [{source.key(i): source.row(i).prompt for i in range(e * SIZE, (e + 1) * SIZE)} for e in range(3)]
        assert rows[0] == rows[1] == rows[2]
        assert len(rows[0]) == source.rows == SIZE
    endless = open_source(DataConfig(source="addition", eval_size=0), seed=0)
    assert endless.rows is None
    assert [endless.key(i) for i in range(3)] == [0, 1, 2]


def test_difficulty_prefers_rows_of_its_band_explores_and_finds_rows_again_that_have_changed():
    source = addition(size=200)

    def rate_of(key, prompt):  # a fifth is neither too easy nor too hard; halfway, that is another fifth
        return 0.5 if (key + (prompt > 1000)) % 5 == 0 else float(key % 5 > 2)

    sees = []
    choose = samplers.Difficulty(explore=0.25, half_life=20)
    chosen = [source.key(i) for i in run(choose, source, 2000, rate_of, sees=sees)]
    assert 50 < len(set(chosen[:200])) < 110
    assert sees[-1] == 1.0
    assert sum(key % 5 == 0 for key in chosen[700:1000]) > 200
    assert sum((key + 1) % 5 == 0 for key in chosen[1700:]) > 200


def test_difficulty_takes_new_rows_of_endless_data_beside_those_of_its_band():
    source = open_source(DataConfig(source="addition", eval_size=0), seed=0)
    chosen = run(samplers.Difficulty(), source, 400, lambda key, prompt: 0.5 if key % 4 == 0 else 0.0)
    again = Counter(chosen[100:])
    assert 120 < len(set(chosen[100:])) < 250
    assert sum(n for key, n in again.items() if key % 4 and n > 2) < 20


def test_rewards_of_another_range_are_rates_too():
    source = addition()
    choose = samplers.Difficulty(explore=0.0, reward_range=(-1.0, 1.0))
    chosen = run(choose, source, 400, lambda key, prompt: 0.0 if key < 20 else 1.0)
    assert sum(source.key(i) < 20 for i in chosen[100:]) > 250


def test_skip_solved_leaves_a_row_out_and_takes_it_again_and_is_shuffle_else():
    source = addition()
    assert run(samplers.SkipSolved(), source, 160, lambda key, prompt: 0.5) == list(range(160))
    chosen = run(samplers.SkipSolved(times=2, epochs=2), source, 200, lambda key, prompt: float(key < 10), late=0)
    epochs = [{source.key(i) for i in chosen if i // SIZE == epoch} for epoch in range(6)]
    assert [min(epoch) for epoch in epochs] == [0, 0, 10, 10, 0, 10]
    flat = samplers.SkipSolved(times=1, epochs=1, reward=None)  # what is never solved is left out as well
    chosen = run(flat, source, 120, lambda key, prompt: 0.5 if key < 10 else 0.0, late=0)
    assert [len([i for i in chosen if i // SIZE == epoch]) for epoch in range(4)] == [40, 10, 40, 10]


def test_skip_solved_ends_where_all_rows_are_solved():
    source = addition()
    chosen = run(samplers.SkipSolved(times=1, epochs=3), source, 80, lambda key, prompt: 1.0, late=0)
    assert chosen == [*range(40), *range(160, 200)]


def test_easy_to_hard_takes_more_and_more_of_the_rows_by_a_field_or_the_measured_rate(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}", "answer": 1, "level": i}) + "\n" for i in range(100)))
    source = open_source(DataConfig(source=str(file), eval_size=0), seed=0)
    levels = [source.key(i) for i in run(samplers.EasyToHard("level", start=0.1), source, 1000, lambda *_: 0.5)]
    early, late = sum(levels[:100]) / 100, sum(levels[600:]) / 400
    assert early < 20 < 45 < late < 55
    measured = run(samplers.EasyToHard(start=0.3), source, 2000, lambda key, prompt: 1 - key / 100)
    early = [source.key(i) for i in measured[100:300]]
    assert sum(early) / 200 < 40 < sum(source.key(i) for i in measured[1000:]) / 1000
    refused("no such number", source, sampler="easy_to_hard", sampler_options={"field": "answer_of"})


def test_mixture_moves_to_the_source_with_signal_within_its_bounds():
    source = two_sources()
    assert source.shares == [30, 10]
    chosen = run(samplers.SignalMixture(), source, 600, lambda key, prompt: 0.5 if key % 2 else 0.0)
    hard = [source.key(i) % 2 for i in chosen]
    assert 0.1 < sum(hard[:60]) / 60 < 0.5
    assert 0.5 < sum(hard[400:]) / 200 < 0.65  # shares 3 : 1, times 0.5 and at most 2
    own = [source.key(i) for i in chosen if source.key(i) % 2]
    assert len(set(own[:10])) == len(set(own[10:20])) == 10  # each source goes on in its own order


def test_the_same_history_gives_the_same_choice_also_from_its_dump():
    for choose in (samplers.Difficulty(), samplers.SkipSolved(), samplers.EasyToHard(), samplers.SignalMixture()):
        source = two_sources()
        history = History(source, 5, 4, 200)
        run(choose, source, 150, lambda key, prompt: key % 3 / 2, history=history)
        copy = History(source, 5, 4, 200)
        copy.load(json.loads(json.dumps(history.dump())))
        assert copy == history
        assert choose(copy, 150) == choose(history, 150)
        passed_on = History()  # of a process that has no data
        passed_on.load(history.dump())
        assert passed_on.dump() == history.dump()


def test_a_choice_looks_at_few_rows_however_many_there_are(monkeypatch):
    source = addition(size=20_000)
    looked = []
    for choose in (
        samplers.Difficulty(),
        samplers.SkipSolved(),
        samplers.EasyToHard(),
        samplers.Difficulty(explore=0.0),
    ):
        history = History(source, 0, 8, 30_000)
        with monkeypatch.context() as patched:
            patched.setattr(source, "key", lambda index, key=source.key: looked.append(index) or key(index))
            run(choose, source, 2000, lambda key, prompt: key % 3 / 2, history=history)
    assert len(looked) < 4 * 2000 * 24


def test_mistakes_are_told():
    source = addition()
    refused("unknown: choose from shuffle, difficulty", source, sampler="dificulty")
    refused("unexpected keyword argument 'lo'", source, sampler="difficulty", sampler_options={"lo": 1})
    refused("low below high", source, sampler="difficulty", sampler_options={"low": 0.9})
    refused("is a function, which has no data.sampler_options", source, sampler="shuffle", sampler_options={"low": 0.9})
    endless = open_source(DataConfig(source="addition", eval_size=0), seed=0)
    refused("needs epochs, but the data has no end", endless, sampler="skip_solved")
    refused("needs several data.sources", source, sampler="mixture")
    refused("has no nothing", source, sampler=f"{__file__}:nothing")
    refused("failed at prompt 0 with ZeroDivisionError", source, sampler=f"{__file__}:raises")
    refused("returned 'first'", source, sampler=f"{__file__}:no_index")


def raises(history, prompt):
    return prompt / 0


def no_index(history, prompt):
    return "first"


class EveryOther:
    """A sampler of one's own."""

    def __init__(self, step: int = 2) -> None:
        self.step = step

    def __call__(self, history: History, prompt: int) -> int:
        return history.last + self.step


def test_a_class_of_ones_own_is_a_sampler_with_options():
    name = f"{__file__}:{EveryOther.__name__}"
    config = DataConfig(source="addition", eval_size=0, sampler=name, sampler_options={"step": 3})
    assert list(islice(run(open_sampler(config, addition()), addition(), 3, lambda *_: 0.5), 3)) == [2, 5, 8]
