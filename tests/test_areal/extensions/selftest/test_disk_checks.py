"""Folders that are fast enough pass, a slow disk fails."""

import os
import time

from areal.extensions.selftest import disk_checks as disk
from areal.extensions.selftest.disk_checks import check_folder


def test_a_folder_is_written_checked_and_copied_and_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "SLOWEST", 1.0)
    findings = check_folder("folder", tmp_path, 0)
    assert findings.result == "ok"
    assert findings.values["bytes"] == disk.LEAST
    assert findings.values["write_bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_fails(tmp_path, monkeypatch):
    sync, rate = os.fsync, disk.SLOWEST / 2

    def slowly(descriptor):
        time.sleep(os.fstat(descriptor).st_size / rate)  # the fault itself: a disk of so many bytes a second
        sync(descriptor)

    monkeypatch.setattr(disk, "LEAST", 1 << 24)
    monkeypatch.setattr(os, "fsync", slowly)
    findings = check_folder("folder", tmp_path, 0)
    assert findings.result == "FAILED"
    assert findings.values["write_bytes_per_second"] < disk.SLOWEST
    assert str(tmp_path) in findings.advice and "weights.folder" in findings.advice


def test_a_container_with_little_shared_memory_fails_if_there_are_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "MEMORY", tmp_path)
    monkeypatch.setattr(disk, "SHARED_MEMORY", 1 << 60)
    monkeypatch.setattr(disk, "MOST", disk.LEAST)  # what is written where there is room
    assert disk.check_memory_folder(0, gpus=True).result == "FAILED"
    assert "--shm-size" in disk.check_memory_folder(0, gpus=True).advice
    assert disk.check_memory_folder(1 << 62, gpus=False).result in ("ok", "skipped")
