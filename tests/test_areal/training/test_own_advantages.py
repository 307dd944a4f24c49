"""An estimator of advantages of the user's own, named in the configuration as an objective is."""

import re

import numpy as np
import pytest
from support.tiny_training import TEMPERATURE, make_forest, make_model, settings

from areal.base.errors import UserError
from areal.training.algorithms.advantages import Credits, estimate
from areal.training.algorithms.estimators import rehearse_estimator
from areal.training.training_engine import TrainingEngine

NUMBER = 3


def quantile(credits: Credits, quantile: float = 0.5) -> np.ndarray:
    baseline = credits.in_groups(lambda totals: np.quantile(totals, quantile))
    return credits.of_tokens - baseline[credits.samples]


class Signs:
    compares_group = True

    def __init__(self, size: float) -> None:
        if size <= 0:
            raise ValueError(f"size is {size}, not above 0")
        self._size = size

    def __call__(self, credits: Credits) -> np.ndarray:
        return self._size * np.sign(credits.of_samples - credits.in_groups(np.mean))


def of_half_the_samples(credits: Credits) -> np.ndarray:
    return credits.of_samples[::2]


def divides_by_the_spread(credits: Credits) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (credits.of_samples - credits.of_samples.mean()) / credits.of_samples.std()


def as_a_list(credits: Credits) -> list[float]:
    return credits.of_samples.tolist()


def looks_for_a_column(credits: Credits) -> np.ndarray:
    return credits.columns["prices"]


def own(name: str) -> str:
    return f"{__file__}:{name}"


def test_a_step_trains_with_the_advantages_of_ones_own_estimator(tmp_path):
    batch = make_forest()
    options = {"advantage": own("quantile"), "advantage_options": {"quantile": 0.25}}
    engine = TrainingEngine(make_model(tmp_path), settings(**options), seed=0, keep_values=True)
    engine.step(batch, version=3, temperature=TEMPERATURE)
    engine.close()
    expected = []
    for group in batch:
        credits = [t.filled("returns") for t in group.trajectories]
        means = [credit[t.sampled].mean() for credit, t in zip(credits, group.trajectories, strict=True)]
        for sequence in (sequence for sample in group.trajectories for sequence in sample.sequences()):
            gains = sequence.filled("returns") - np.quantile(means, 0.25)
            expected.append(np.where(sequence.sampled, gains, 0))
    np.testing.assert_allclose(engine.values.advantages, np.concatenate(expected), rtol=1e-6, atol=1e-7)


def test_one_advantage_for_each_sample_is_that_of_its_tokens():
    estimator = rehearse_estimator(settings(advantage=own("Signs"), advantage_options={"size": 2}))
    samples = np.array([0, 0, 1, 1, 1])
    credits = Credits(np.array([1.0, 0.0]), np.array([0, 0]), samples, np.ones(5, bool), None, None, {})
    assert estimate(estimator, credits, "signs").tolist() == [2, 2, -2, -2, -2]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("of_half_the_samples", {}, "called on 4 samples with 12 tokens, returned an array of shape [2]: return one"),
        ("divides_by_the_spread", {}, "called on 2 samples with 6 tokens, returned advantages that are not finite"),
        ("as_a_list", {}, "returned a value of type list: return a NumPy array"),
        ("looks_for_a_column", {}, "raised KeyError: 'prices'"),
        ("quantile", {"quantle": 0.5}, "unexpected keyword argument 'quantle'"),
        ("quantile", {"quantile": 2}, "raised ValueError"),
        ("Signs", {"size": 0}, "size is 0, not above 0: correct trainer.advantage_options"),
        ("NUMBER", {}, "is of type int: name a function or a class"),
        ("quantil", {}, "did you mean quantile"),
    ],
)
def test_a_mistake_in_ones_own_estimator_is_told_in_a_sentence_that_names_it(name, options, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)) as raised:
        rehearse_estimator(settings(advantage=own(name), advantage_options=options))
    assert own(name) in str(raised.value) and "\n" not in str(raised.value)


def test_an_estimator_that_fails_in_a_step_ends_it_with_a_sentence(tmp_path):
    engine = TrainingEngine(make_model(tmp_path), settings(advantage=own("quantile")), seed=0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="not finite: look for a division by 0"):
        patch.setattr(np, "quantile", lambda totals, share: np.nan)
        engine.step(make_forest(), version=3, temperature=TEMPERATURE)
    engine.close()


def test_an_unknown_estimator_is_told_with_the_known_ones():
    with pytest.raises(UserError, match="there is no advantage 'quantile': name one of normalised, or your own as"):
        rehearse_estimator(settings(advantage="quantile"))
    with pytest.raises(ValueError, match=r"trainer\.advantage_options are those of an estimator of your own"):
        settings(advantage_options={"quantile": 0.5})
