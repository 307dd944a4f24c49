"""Secrets are hidden by the names and by the shapes that they have in real configurations, and nothing else is."""

from __future__ import annotations

import copy
import json

import pytest

from areal.base.secrets import HIDDEN, hidden_in, reveal, secrets_in, without_secrets

SECRET = "Zx9_f3kQ81pLw0aM"
FORMS = {
    "a plural": {"api_keys": [SECRET]},
    "tokens": {"tokens": [SECRET, SECRET]},
    "bearer": {"bearer": SECRET},
    "pass": {"pass": SECRET},
    "dsn": {"sentry_dsn": f"https://{SECRET}@host/1"},
    "signature": {"signature": SECRET},
    "a number": {"token2": SECRET, "api_key_2": SECRET},
    "a header": {"headers": {"Authorization": f"Bearer {SECRET}"}},
    "a header in a text": {"command": f"curl -H 'Authorization: Bearer {SECRET}' host"},
    "a query": {"url": f"https://host/x?user=me&token={SECRET}&n=1"},
    "a signed query": {"url": f"https://host/x?X-Amz-Signature={SECRET}"},
    "a query's sig": {"url": f"https://host/x?sig={SECRET}"},
    "a user": {"url": f"postgres://me:{SECRET}@host/db"},
    "an option of a list": {"args": ["--port", "80", "--api-key", SECRET]},
    "an option with =": {"args": [f"--api-key={SECRET}"]},
    "an option of a command": {"command": f"serve --port 80 --password {SECRET} --fast"},
    "a variable in a list": {"env": [f"HF_TOKEN={SECRET}"]},
    "a variable in a command": {"command": f"env WANDB_API_KEY={SECRET} serve"},
    "a variable in quotes": {"command": f"env WANDB_API_KEY='{SECRET}' serve"},
    "a name and a value": {"env": [{"name": "HF_TOKEN", "value": SECRET}]},
    "a token of a hub": {"anything": f"hf_{SECRET}"},
    "a token of a service": {"anything": f"use sk-proj-{SECRET} here"},
    "a token of a forge": {"anything": f"ghp_{SECRET}"},
    "a private key": {"anything": f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----"},
    "keys": {"keys": [SECRET]},
    "the id of a key": {"aws_access_key_id": SECRET, "session_id": SECRET},
    "short names": {"db_pw": SECRET, "pat": SECRET, "sas": SECRET},
    "a connection": {"connection_string": f"AccountKey {SECRET}"},
    "a name with a place": {"token_file": f"/run/{SECRET}", "api_key_prod": SECRET},
    "under a name": {"auth": {"user": SECRET, "more": [{"n": SECRET}]}},
}
PUBLIC = {
    "max_tokens": 512,
    "stop": ["<|im_end|>"],
    "tokens": 3,
    "pad_token": 0,
    "token_ids": [1, 2],
    "keys": "folder/keys",
    "url": "https://host:80/x?page=2&split=test",
    "command": "python agent.py --max-tokens 5 --key-column q",
    "args": ["--tokenizer", "mine", "--n", "3"],
    "env": [{"name": "LANG", "value": "C"}],
    "basic_auth": True,
    "gateway_keys": {"anna": {"rights": ["serve"]}},
    "path": "a/path",
    "format": "pattern",
    "prompt_key": "question",
    "bypass": "x",
    "author": "y",
    "compass": "z",
    "text": "a secret token is passed",
    "task": "monkey",
    "signatures_checked": "all",
    "bos_token_id": "7",
    "template": "{{ token }} = {{ value }}",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_of_this_form_is_shown_nowhere_and_comes_back(form):
    values = copy.deepcopy(FORMS[form])
    shown = without_secrets(values)
    assert SECRET not in json.dumps(shown)
    assert hidden_in(shown)
    assert without_secrets(shown) == shown
    reveal(shown, secrets_in(values))
    assert shown == values == FORMS[form]


@pytest.mark.parametrize("key", PUBLIC)
def test_what_is_no_secret_is_shown_as_it_is(key):
    assert without_secrets({key: PUBLIC[key]}) == {key: PUBLIC[key]}


def test_only_the_secret_of_a_text_is_hidden():
    shown = without_secrets({"command": f"serve --port 80 --password {SECRET} --url https://me:{SECRET}@host/?a=1"})
    assert shown == {"command": f"serve --port 80 --password {HIDDEN} --url https://{HIDDEN}@host/?a=1"}
