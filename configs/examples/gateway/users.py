"""Simulated users of a policy in training: each asks for a sum, and says later whether the answer was right."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai

from areal.data import addition

USERS, KEY, PORT = 48, "key-of-the-example", 8080
FOLDER = Path(__file__).parent


def use(number: int, client: openai.OpenAI, over: threading.Event) -> None:
    """One user. The thumb for an answer comes after the next question."""
    earlier = None
    for question in itertools.count():
        row = addition.make_row(number, question, max_digits=8)
        session = f"user-{number}-{question}"
        messages = [{"role": "user", "content": row["prompt"]}]
        try:
            answer = client.chat.completions.create(
                model="policy", messages=messages, extra_headers={"X-Session-Id": session}
            )
            if earlier is not None:
                client.post(
                    f"/sessions/{earlier[0]}/reward", body={"reward": earlier[1], "id": earlier[0]}, cast_to=object
                )
        except openai.APIError as error:
            if over.wait(0.5):
                return
            print(f"user {number}: {error}", file=sys.stderr)
            continue
        earlier = session, addition.reward(row["prompt"], answer.choices[0].message.content or "", row)


def main() -> int:
    """Start the run, and users once it serves. key=value on the command line changes the run."""
    options = dict(option.split("=", 1) for option in sys.argv[1:] if "=" in option)
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{options.get('gateway.port', PORT)}/v1", api_key=KEY, max_retries=5
    )
    command = [sys.executable, "-m", "areal", "run", str(FOLDER / "run.yaml"), *sys.argv[1:]]
    with subprocess.Popen(command) as run:
        over = threading.Event()
        while run.poll() is None:
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                time.sleep(0.5)
        users = [threading.Thread(target=use, args=(n, client, over), daemon=True) for n in range(USERS)]
        for user in users:
            user.start()
        code = run.wait()
        over.set()
    return code


if __name__ == "__main__":
    sys.exit(main())
