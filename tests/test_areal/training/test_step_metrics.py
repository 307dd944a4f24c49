"""The seconds of a step's phases on a GPU."""

from types import SimpleNamespace

import torch

from areal.training.step_metrics import Tally


def test_a_phase_ends_with_its_own_stream_and_waits_for_no_other(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("the device"))
    stream = SimpleNamespace(synchronize=lambda: waits.append("its stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    tally = Tally(torch.device("cpu"))
    tally.sums = SimpleNamespace(is_cuda=True)
    with tally.clock("forward"):
        assert not waits
    assert waits == ["its stream"]
    assert tally.seconds["forward"] > 0
