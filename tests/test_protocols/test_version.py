"""Two actors understand each other if the digests of what they send are equal; whoever differs is told what to do."""

import os
import subprocess
import sys
from typing import Annotated, Literal

import numpy as np
import pytest
from pydantic import AfterValidator, BaseModel, Field, InstanceOf

from protocols.codec import PROTOCOL_VERSION, Header
from protocols.messages import Float32s, Int32s, OfType
from protocols.version import MODELS, description_of, difference, version_of


def model(name="Ask", /, **fields):
    return type(name, (BaseModel,), {"__annotations__": fields, "__module__": __name__})


CHANGES = {
    "another kind": model("Asks", count=int),
    "another name": model(number=int),
    "one field more": model(count=int, name=str),
    "another type": model(count=int | None),
    "another limit": model(count=Annotated[int, Field(ge=1)]),
    "a limit inside": model(count=tuple[Annotated[int, Field(ge=1)], ...]),
    "another literal": model(count=Literal["one"]),
    "a literal more": model(count=Literal["one", "two"]),
    "an array": model(count=Int32s),
    "an array of another type": model(count=Float32s),
}


def test_what_is_sent_differently_has_another_version():
    versions = {version_of([changed], ("kind",)) for changed in (model(count=int), *CHANGES.values())}
    versions.add(version_of([model(count=int)], ("kind", "sender")))
    assert len(versions) == len(CHANGES) + 2


def test_order_and_documentation_do_not_matter():
    first, second = model(count=int, name=str), model("Answer", place=int)
    documented = model(name=str, count=int)
    documented.__doc__ = "Asks something."
    assert version_of([first, second], ("kind",)) == version_of([second, documented], ("kind",))
    array = InstanceOf[np.ndarray]
    assert version_of([model(a=Annotated[array, AfterValidator(OfType("int32"))])], ()) == version_of(
        [model(a=Annotated[array, AfterValidator(OfType("int32"))])], ()
    )


def test_nothing_of_one_process_or_one_python_is_in_a_version():
    text = "\n".join(map(description_of, MODELS))
    assert "Credit parts: int (Ge(ge=1), Le(le=1000000))" in text.splitlines()
    assert not any(word in text for word in (" at 0x", "typing.", "Optional", "<class", "FieldInfo"))
    assert version_of(MODELS, Header._fields) == PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("first", "flag"),  # -OO compiles all that is imported, so it has few imports
    [("protocols.messages", "-OO"), ("protocols.transport", "-O"), ("actors.master.master", "-B")],
)
def test_every_process_has_the_same_version(first, flag):
    program = f"import {first}\nfrom protocols.codec import PROTOCOL_VERSION\nprint(PROTOCOL_VERSION)"
    environment = os.environ | {"PYTHONHASHSEED": str(len(first))}
    done = subprocess.run([sys.executable, flag, "-c", program], env=environment, capture_output=True, check=True)
    assert int(done.stdout) == PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("peer", "own", "said"),
    [
        ("0.9.1", "0.10.0", "the peer has version 0.9.1 of the project, older than this actor's 0.10.0: install"),
        ("1.0.0", "0.10.0", "the peer has version 1.0.0 of the project, newer than this actor's 0.10.0: install"),
        ("0.2.0", "0.2.0", "the peer has another commit of version 0.2.0 of the project, with"),
        ("", "0.2.0", "the peer speaks another version of the protocol than this actor: install the same version"),
        (None, "0.2.0", "the peer speaks another version of the protocol"),
        ("0.1\n\x1b[2J", "0.2.0", "the peer speaks another version of the protocol"),
        ({"a": 1}, "0.2.0", "the peer speaks another version of the protocol"),
        ("0.2.0", "", "the peer speaks another version of the protocol"),
    ],
)
def test_a_peer_of_another_version_is_told_what_to_install(peer, own, said):
    sentence = difference(peer, own)
    assert sentence.startswith(said) and "on every node" in sentence and "\n" not in sentence
