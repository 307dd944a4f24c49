"""Task sets of the verifiers library; tests/test_areal/extensions/agents/test_openai_endpoint.py does their tasks."""

from __future__ import annotations

import importlib.util

import pytest

from areal.base.errors import UserError
from areal.config.data_section import DataConfig
from areal.data.sources import open_source

is_installed = importlib.util.find_spec("verifiers") is not None


@pytest.mark.skipif(is_installed, reason="verifiers is installed")
def test_without_the_library_the_user_is_told_how_to_install_it():
    with pytest.raises(UserError, match="pip install 'verifiers"):
        open_source(DataConfig(source="verifiers:prices"), seed=0)


@pytest.mark.skipif(not is_installed, reason="verifiers is not installed")
def test_a_task_set_that_does_not_load_is_a_mistake_of_the_users():
    with pytest.raises(UserError, match="does not load"):
        open_source(DataConfig(source="verifiers:no-such-thing"), seed=0)
