"""A version of this program says which files it understands."""

from __future__ import annotations

import tomllib

from areal.base.processes import ROOT
from areal.storage import journal, rollout_files, spool_file

VERSIONS = {"0.2": {"journal": 10, "spool": 11, "rollouts": 3}}
"""The formats of each version. Whoever changes one raises the middle number in pyproject.toml, once for the next
release, and adds a line here."""


def test_a_changed_format_has_a_version_of_its_own():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"].rpartition(".")[0]
    formats = {
        "journal": journal.FORMAT_VERSION,
        "spool": spool_file.FORMAT_VERSION,
        "rollouts": rollout_files.FORMAT_VERSION,
    }
    assert list(VERSIONS)[-1] == version
    assert VERSIONS[version] == formats
    assert len({str(formats) for formats in VERSIONS.values()}) == len(VERSIONS)
