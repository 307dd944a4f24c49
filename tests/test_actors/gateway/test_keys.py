"""The keys of a gateway and their accounts, and that what is remembered of them is bounded."""

from hashlib import sha256

import pytest

from actors.gateway import keys as gateway_keys
from actors.gateway.keys import UserKeys
from actors.master.accounts import KeyRecords
from areal.config.role_sections import KeyConfig
from areal.extensions.agents.openai_api import ApiError
from protocols.session_messages import KeyUse

KEYS = {name: sha256(name.encode()).hexdigest() for name in ("anna", "bert")}


def keys_of(clock, **quotas):
    return UserKeys({name: KeyConfig(sha256=digest, **quotas) for name, digest in KEYS.items()}, clock)


def test_what_a_key_has_used_is_forgotten_after_a_minute_and_takes_no_room_meanwhile():
    now = [0.0]
    account = keys_of(lambda: now[0], tokens_per_minute=100).accounts["anna"]
    for _ in range(1000):
        account.use_calls()
        account.tokens.add(1)
    with pytest.raises(ApiError, match="100 tokens a minute"):
        account.check_tokens()
    assert (account.use, len(account.calls._seconds)) == (KeyUse(calls=1000, tokens=1000, refused=1), 1)
    now[0] = 60.0
    account.check_tokens()
    assert account.use == KeyUse(refused=1)


def test_an_answer_in_progress_counts_with_all_tokens_that_it_may_have_until_it_ends_however_it_ends():
    account = keys_of(lambda: 0.0, tokens_per_minute=100).accounts["anna"]
    with pytest.raises(ZeroDivisionError), account.answer(100):
        account.tokens.add(7)
        with pytest.raises(ApiError, match="100 tokens a minute"):
            account.check_tokens()
        raise ZeroDivisionError
    account.check_tokens()
    assert account.use.tokens == 7


def test_what_a_key_uses_at_another_gateway_counts_and_for_a_minute_after_that_gateway_is_lost():
    records, use = KeyRecords(), KeyUse(calls=2, tokens=100, sessions=1)
    records.note("gateway/0#1", {"anna": use}, 0.0)
    records.note("gateway/1#1", {"anna": use}, 1.0)
    assert records.total(1.0, apart="gateway/0#1") == {"anna": use}
    assert records.total(1.0) == {"anna": KeyUse(calls=4, tokens=200, sessions=2)}
    for name in ("calls_per_minute", "tokens_per_minute", "sessions"):
        account = keys_of(lambda: 0.0, **{name: 1}).accounts["anna"]
        account.elsewhere = use
        with pytest.raises(ApiError) as refusal:
            account.use_calls()
            account.check_tokens()
            with account.opening("anna:s"):
                pass
        assert refusal.value.status == 429
    records.note("gateway/0#2", {}, 30.0)
    assert records.total(30.0, apart="gateway/0#2")["anna"] == KeyUse(calls=4, tokens=200), (
        "its sessions go on elsewhere"
    )
    records.note("gateway/0#2", {}, 61.0)
    assert records.total(61.0) == {}


def test_a_key_that_opens_very_many_sessions_makes_no_other_key_forget_one(monkeypatch):
    monkeypatch.setattr(gateway_keys, "SESSION_KEYS", 2)
    keys = keys_of(lambda: 0.0)
    key_of_bert = keys.key_for("bert:0")
    first, *further = [keys.key_for(f"anna:{number}") for number in range(3)]
    assert [keys.identify(key)[1] for key in (*further, key_of_bert)] == ["anna:1", "anna:2", "bert:0"]
    keys.forget("anna:1")
    for gone in (first, further[0]):
        with pytest.raises(ApiError, match="not known"):
            keys.identify(gone)
