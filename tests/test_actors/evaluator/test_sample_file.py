"""The samples of a benchmark on disk."""

from __future__ import annotations

from actors.evaluator.sample_file import SampleFile


def test_what_was_appended_is_read_again_without_a_line_that_is_cut(tmp_path):
    file = SampleFile(tmp_path, "sums", 3, {"temperature": 1.0})
    assert list(file.read()) == []
    file.append({"row": 0, "sample": 0})
    file.append({"row": 0, "sample": 1})
    with (tmp_path / "benchmarks" / "sums-3.jsonl").open("a") as torn:
        torn.write('{"row": 1, "sam')
    assert [(s["row"], s["sample"]) for s in file.read()] == [(0, 0), (0, 1)]
    file.append({"row": 1, "sample": 0})
    assert [(s["row"], s["sample"]) for s in file.read()] == [(0, 0), (0, 1), (1, 0)]


def test_samples_made_under_other_settings_are_kept_and_not_read(tmp_path):
    cold, warm = (SampleFile(tmp_path, "sums", 0, {"temperature": t}) for t in (0.0, 1.0))
    cold.append({"row": 0})
    warm.append({"row": 1})
    assert [sample["row"] for sample in warm.read()] == [1]
    assert [sample["row"] for sample in cold.read()] == [0]
