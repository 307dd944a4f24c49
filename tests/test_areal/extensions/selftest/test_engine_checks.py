"""The order in which the engines are started, tried and compared."""

import inspect

import pytest

from areal.extensions.selftest.engine_checks import CHECKPOINT_BYTES, EngineTest, too_large
from areal.extensions.selftest.findings import Finding
from areal.extensions.selftest.generator_checks import GenerationChecks
from areal.extensions.selftest.synthetic import tiny_config
from areal.extensions.selftest.trainer_checks import TrainingChecks

PARTS = {"trainer": TrainingChecks, "generator": GenerationChecks}


class Child:
    def __init__(self, part: str) -> None:
        self.part = part
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    close = kill


class Orders:
    """Has everything done at once. `given`: the orders, with the part that got them. fails: one that does not work."""

    ANSWERS = {
        "checkpoint_bytes": {"bytes": 1000},
        "operations": {"of_token": 1.0, "peak_tflops": None},
        "send": {"call": "a", "info": {}},
        "sent": {},
    }

    def __init__(self, only=(), fails="") -> None:
        self.given, self.rows, self._only, self._fails = [], {}, set(only), fails

    def do(self, model, child, order, finds, needed_for=(), **arguments):
        if not self.selects(finds | set(needed_for)):
            return None
        assert not child.killed, f"{order} of a {child.part} that is gone"
        inspect.signature(getattr(PARTS[child.part], order)).bind(self, **arguments)
        self.given.append(f"{child.part} {order}")
        if order == self._fails:
            return None
        self.rows |= dict.fromkeys(finds, "ok")
        facts = {"seconds": 1.0, "free_at_start": None}
        return [] if finds or order in {"sample", "receive", "keep", "close"} else self.ANSWERS.get(order, facts)

    def follows(self, model, names, ready, needed_for=()):
        selected = self.selects(names | set(needed_for))
        if selected and not ready:
            self.rows |= dict.fromkeys(names, "skipped")
        return selected and ready

    def selects(self, names):
        return not self._only or not self._only.isdisjoint(names)

    def add(self, model, findings: list[Finding]):
        self.rows |= {finding.name: finding.result for finding in findings}


@pytest.fixture
def run(tmp_path_factory):
    def run(only=(), fails="", **changes):
        orders, folder = Orders(only, fails), tmp_path_factory.mktemp("run")
        EngineTest(orders, "tiny", tiny_config(folder, "float32", **changes), Child, folder).run()
        return orders

    return run


def test_in_turns_one_engine_has_the_devices_and_the_other_has_left_them(run):
    orders = run(colocate=True)
    assert orders.rows.keys() >= {"turns", "kept cache", "checkpoint", "restart", "interruption", "busy load"}
    on_devices = set()
    for given_order in orders.given:
        part, order = given_order.split()
        if order in {"sleep", "offload", "close"}:
            on_devices.discard(part)
        elif order in {"start", "start_again", "wake", "reload"}:
            on_devices.add(part)
            assert on_devices == {part}, given_order
        elif order in {"save", "resume", "logprobs", "longest", "sample", "interrupt", "keep", "speed"}:
            assert on_devices == {part}, given_order


def test_a_killed_trainer_is_replaced_before_its_weights_are_sent(run):
    orders_given = run(transport="direct").given
    save, wait, start, resume, send = (
        orders_given.index(f"trainer {order}") for order in ("save", "wait_for_memory", "start", "resume", "send")
    )
    assert start < save < wait < resume < send
    assert orders_given.index("trainer wait_for_memory") < orders_given.index("trainer start_again") < resume
    assert not {"generator sleep", "trainer offload"} & {*orders_given}


@pytest.mark.parametrize(
    ("only", "orders"),
    [
        ({"restart"}, ["start", "checkpoint_bytes", "save", "wait_for_memory", "start_again"]),
        ({"checkpoint"}, ["start", "checkpoint_bytes", "save", "wait_for_memory", "start_again", "resume"]),
        ({"longest row"}, ["start", "longest"]),
        ({"generation"}, ["operations", "start", "speed"]),
        ({"busy load", "training"}, ["operations", "start", "speed", "start", "longest"]),
    ],
)
def test_one_check_alone_does_only_what_it_needs(run, only, orders):
    results = [order.split()[1] for order in run(only).given]
    assert sorted(results) == sorted(orders)
    run(only, colocate=True)  # and ends


def test_what_needs_an_order_that_has_failed_is_skipped(run):
    rows = run(fails="logprobs").rows
    assert {name for name, result in rows.items() if result == "skipped"} >= {"load", "engine", "interruption"}
    assert rows["longest row"] == "ok"


def test_a_cache_is_kept_only_where_the_run_keeps_it(run):
    assert "generator keep" not in run(generator={"kv_on_update": "recompute"}).given
    assert "generator keep" not in run(trainer={"lora": {"rank": 2}}).given


def test_a_checkpoint_that_is_too_large_is_not_written(run, monkeypatch):
    assert not too_large(1e9, 2e9)
    assert "many for a check" in too_large(CHECKPOINT_BYTES + 1, 1e15)
    assert "the disk" in too_large(1e9, 1e9)
    monkeypatch.setitem(Orders.ANSWERS, "checkpoint_bytes", {"bytes": 2 * CHECKPOINT_BYTES})
    orders = run()
    assert (orders.rows["checkpoint"], orders.rows["restart"]) == ("skipped", "skipped")
    assert "trainer save" not in orders.given
