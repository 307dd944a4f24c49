import json

import vs_trl


def test_of_trl_the_steps_after_the_first_count_and_what_was_never_trained_on_is_unused(tmp_path):
    keys = ("time", "samples_generated", "tokens_generated", "samples_trained", "tokens_trained")
    totals = [(9, 900, 9, 100, 1), (10, 1000, 1000, 200, 100), (12, 1200, 9000, 300, 2100)]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(dict(zip(keys, t, strict=True))) + "\n" for t in totals))
    (tmp_path / "result.json").write_text(json.dumps({"accuracy_after": 0.5}))
    assert vs_trl.trls(tmp_path) == {
        "samples_per_second": 50,
        "unused_share": 0.75,
        "generated_length": 40,
        "trained_length": 20,
        "accuracy_after": 0.5,
    }
