"""Frames that look for ways through the codec nobody thought of: those that reach new code are varied further.

    pip install -e '.[fuzz]'
    python tests/fuzz_codec.py FOLDER -max_total_time=300     # what was found in FOLDER, and libFuzzer's options
    python tests/fuzz_codec.py crash-...                      # a failure again

Frames may only be decoded, or refused with a typed error; what is decoded has to come out the same when it is encoded
and decoded again.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed: pip install -e '.[fuzz]' (it needs Linux and Python 3.11 to 3.13)")

with atheris.instrument_imports(include=["protocols"]):
    from malformed import Malformed

    from protocols.codec import decode_body, decode_header, encode
    from protocols.errors import MalformedError, ProtocolVersionError

SEEDS = 400


def frames_of(data: bytes) -> list[bytes]:
    """Frames, each after its length in two bytes; what is left is the last one."""
    frames = []
    while len(data) > 2:
        size = int.from_bytes(data[:2])
        frames.append(data[2 : 2 + size])
        data = data[2 + size :]
    return [*frames, data] if data else frames


def decode_or_refuse(data: bytes) -> None:
    frames = frames_of(data)
    try:
        header = decode_header(frames)
        message = decode_body(header.kind, frames)
    except (MalformedError, ProtocolVersionError):
        return
    again = [bytes(frame) for frame in encode(header, message)]
    assert decode_header(again) == header
    # Compared as bytes: arrays do not compare as one, and a number that is none equals nothing.
    twice = encode(header, decode_body(header.kind, again))
    assert [bytes(frame) for frame in twice] == again


def seed(folder: Path) -> None:
    """Messages of all kinds to begin with."""
    folder.mkdir(parents=True, exist_ok=True)
    malformed = Malformed(0, run="run")
    for i in range(SEEDS):
        frames = malformed.frames()
        if all(len(frame) < 1 << 16 for frame in frames):
            (folder / f"seed-{i}").write_bytes(b"".join(len(frame).to_bytes(2) + frame for frame in frames))


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("name a folder to keep the frames in, or a file to try again: python tests/fuzz_codec.py FOLDER")
    if not Path(sys.argv[1]).is_file():
        seed(Path(sys.argv[1]))
    atheris.Setup(sys.argv, decode_or_refuse)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
