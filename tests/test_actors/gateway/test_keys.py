"""The keys of a gateway and their quotas, and that what is remembered of them is bounded."""

from hashlib import sha256

import pytest

from actors.gateway import keys as gateway_keys
from actors.gateway.keys import UserKeys
from areal.config.role_sections import KeyConfig
from areal.extensions.agents.openai_api import ApiError

DIGEST = sha256(b"secret").hexdigest()


def keys_of(clock, **quotas):
    return UserKeys({"anna": KeyConfig(sha256=DIGEST, **quotas)}, clock)


def test_what_a_key_used_is_forgotten_after_a_minute_and_not_counted_where_it_has_no_quota():
    now = [0.0]
    keys = keys_of(lambda: now[0], tokens_per_minute=100)
    for _ in range(1000):
        keys.use_call("anna")
    keys.count("anna", "tokens", 100)
    with pytest.raises(ApiError, match="100 tokens a minute"):
        keys.use_call("anna")
    now[0] = 60.0
    keys.use_call("anna")
    assert not any(keys._uses.values())


def test_the_oldest_key_of_a_session_is_forgotten_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr(gateway_keys, "SESSION_KEYS", 2)
    keys = keys_of(lambda: 0.0)
    first, *others = [keys.key_for("anna", f"anna:{number}") for number in range(3)]
    assert [keys.identify(key) for key in others] == [("anna", "anna:1"), ("anna", "anna:2")]
    with pytest.raises(ApiError, match="not known"):
        keys.identify(first)
