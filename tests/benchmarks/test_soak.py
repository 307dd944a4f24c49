"""The soak sees what would be wrong with a run."""

import json

import pytest
import soak
from soak_run import SECONDS, TARGETS, SoakRun

RECORDS = [
    {"step": 1, "time": 100.0, "staleness_max": 0, "prompts": [0, 1, 2, 3], "discarded": []},
    {"step": 2, "time": 101.0, "staleness_max": 1, "prompts": [4, 5, 7, 8], "discarded": [(6, "reward")]},
    {"step": 3, "time": 119.0, "staleness_max": 4, "prompts": [9, 10, 11, 13], "discarded": []},
    {"step": 4, "time": 120.0, "staleness_max": 4, "prompts": [14, 15, 16, 17], "discarded": []},
]
SUMMARY = {"ok": True, "steps": 4, "discarded": [], "prompts_open": [12]}


def test_the_accounts_of_a_run_are_right():
    assert not list(soak.check_accounts(RECORDS, SUMMARY))


@pytest.mark.parametrize(
    ("step", "change", "violation"),
    [
        (1, {"prompts": [4, 5, 7, 3]}, "prompt 3 has 2 fates"),
        (1, {"discarded": []}, "prompt 6 was lost"),
        (1, {"discarded": [(6, "")]}, "prompt 6 was discarded without a reason"),
        (2, {"staleness_max": 5}, "step 3: staleness 5"),
        (2, {"step": 4}, "does not have each step once"),
    ],
)
def test_a_wrong_account_is_a_violation(step, change, violation):
    records = [record | (change if place == step else {}) for place, record in enumerate(RECORDS)]
    assert any(violation in findings for findings in soak.check_accounts(records, SUMMARY))


def test_only_growth_is_a_violation():
    def samples(last):
        sizes = [2e8] * 30 + [2.4e8] * 60 + [last] * 10
        actors = [[{"role": "master", "age": 100.0, "memory": size}] for size in sizes]
        return [{"steps": step, "actors": actor} for step, actor in enumerate(actors)]

    assert not list(soak.grown({"memory": soak.ends_by_role(samples(2.4e8), "memory")}))
    assert list(soak.grown({"memory": soak.ends_by_role(samples(4e8), "memory")}))


def test_a_fault_costs_what_comes_before_the_next_one(tmp_path):
    faults = [
        {"time": 101.5, "kind": "kill", "target": "trainer", "seconds": 0.0, "steps": 2, "output": 7},
        {"time": 119.5, "kind": "kill", "target": "reward", "seconds": 0.0, "steps": 3, "output": 28},
    ]
    (tmp_path / "faults.jsonl").write_text("".join(json.dumps(fault) + "\n" for fault in faults))
    (tmp_path / "out.txt").write_text("step 2\ntrainer/0 was killed\nstep 3\n")
    trainer, reward = soak.costs(tmp_path, RECORDS)
    assert (trainer["next_step"], trainer["standstill"], trainer["lines"]) == (17.5, 18.0, ["trainer/0 was killed"])
    assert (reward["next_step"], reward["standstill"], reward["lines"]) == (0.5, 1.0, [])


def test_every_kind_of_fault_comes_before_one_comes_again(tmp_path, monkeypatch):
    monkeypatch.setattr(SoakRun, "_start", lambda self, *words: None)
    run = SoakRun(tmp_path, [], list(TARGETS), seed=1)
    rounds = [[run.draw() for _ in TARGETS] for _ in range(20)]
    assert all({kind for kind, _, _ in faults} == set(TARGETS) for faults in rounds)
    assert {(kind, target) for faults in rounds for kind, target, _ in faults} > {
        ("kill", "engine"),
        ("pause", "master"),
    }
    assert all(seconds > 0 for faults in rounds for kind, _, seconds in faults if kind in SECONDS)
