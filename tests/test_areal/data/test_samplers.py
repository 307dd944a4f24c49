"""Samplers: which rows they choose from what the prompts before have shown."""

import json
from collections import Counter
from itertools import islice

import pytest
from conftest import ROOT

from areal.base.errors import UserError
from areal.base.plugins import load
from areal.config.data_section import DataConfig, RowsConfig
from areal.data.history import History
from areal.data.samplers import open_sampler
from areal.data.sources import open_source

DIFFICULTY = f"{ROOT}/configs/examples/difficulty/difficulty.py:Difficulty"
Difficulty = load(DIFFICULTY, "data.sampler")
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
    choose = Difficulty(explore=0.25, half_life=20)
    chosen = [source.key(i) for i in run(choose, source, 2000, rate_of, sees=sees)]
    assert 50 < len(set(chosen[:200])) < 110
    assert sees[-1] == 1.0
    assert sum(key % 5 == 0 for key in chosen[700:1000]) > 200
    assert sum((key + 1) % 5 == 0 for key in chosen[1700:]) > 200


def test_difficulty_takes_new_rows_of_endless_data_beside_those_of_its_band():
    source = open_source(DataConfig(source="addition", eval_size=0), seed=0)
    chosen = run(Difficulty(), source, 400, lambda key, prompt: 0.5 if key % 4 == 0 else 0.0)
    again = Counter(chosen[100:])
    assert 120 < len(set(chosen[100:])) < 250
    assert sum(n for key, n in again.items() if key % 4 and n > 2) < 20


def test_rewards_of_another_range_are_rates_too():
    source = addition()
    choose = Difficulty(explore=0.0, reward_range=(-1.0, 1.0))
    chosen = run(choose, source, 400, lambda key, prompt: 0.0 if key < 20 else 1.0)
    assert sum(source.key(i) < 20 for i in chosen[100:]) > 250


def test_the_same_history_gives_the_same_choice_also_from_its_dump():
    for choose in (Difficulty(), EveryOther()):
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
    for choose in (Difficulty(), Difficulty(explore=0.0)):
        history = History(source, 0, 8, 30_000)
        with monkeypatch.context() as patched:
            patched.setattr(source, "key", lambda index, key=source.key: looked.append(index) or key(index))
            run(choose, source, 2000, lambda key, prompt: key % 3 / 2, history=history)
    assert len(looked) < 4 * 2000 * 24


def test_mistakes_are_told():
    source = addition()
    refused("there is no sampler 'shufle': name one of shuffle, or your own", source, sampler="shufle")
    refused("unexpected keyword argument 'lo'", source, sampler=DIFFICULTY, sampler_options={"lo": 1})
    refused("low below high", source, sampler=DIFFICULTY, sampler_options={"low": 0.9})
    refused("is a function, which has no data.sampler_options", source, sampler="shuffle", sampler_options={"low": 0.9})
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
