"""Shell scripts of targets: templates, and the commands of the parts."""

import shlex
from collections.abc import Iterator
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from areal.extensions.launch.targets import FINAL, FINAL_OF_MASTER, Launch


def render(template: str, **values: Any) -> str:
    """Return the text of a template in this folder. `{{ value | q }}` is a word of the shell."""
    environment = Environment(
        loader=PackageLoader("areal.extensions.launch", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",  # the default occurs in ${#array[@]}
        comment_end_string="#>",
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    return environment.get_template(template).render(values)


def values_of(launch: Launch, python: str, run: str = "", shield: bool = False) -> dict[str, Any]:
    """Return the common values of the templates. In the scripts $folder is the launch's folder, $address the master's
    address, and $rendezvous the ranks' meeting place. run: the run folder on node 0, by default the parent of $folder.
    shield: whether the scheduler tells all processes to leave, so that torchrun must not tell the ranks again.
    """
    return {
        "port": launch.port,
        "first": min((process.node for process in launch.placement.of("trainer")), default=0),
        "rendezvous_port": launch.cluster.rendezvous_port,
        "master": f"{python} {_quoted(launch.master('$folder', '$address', run))}",
        "parts": list(_parts(launch, python, shield)),
        "final": " ".join(map(str, FINAL)),
        "final_of_master": " ".join(map(str, FINAL_OF_MASTER)),
    }


def _parts(launch: Launch, python: str, shield: bool) -> Iterator[dict[str, Any]]:
    """Yield node, name and command of each part besides the master."""
    for node, processes in launch.parts():
        devices = ",".join(str(device) for process in processes for device in process.devices)
        visible = f"env CUDA_VISIBLE_DEVICES={devices} " if launch.cluster.device == "gpu" else ""
        roles = {process.role for process in processes}
        name = "roles" if len(roles) > 1 else processes[0].name
        words = launch.command(processes, "$address", "$rendezvous")
        if shield and "torch.distributed.run" in words:  # a second TERM would end the ranks at once
            words.insert(2, "--signals-to-handle=SIGINT")
            visible += """bash -c 'trap "" TERM; exec "$@"' torchrun """
        yield {"node": node, "name": f"{name}-{node}", "command": f"{visible}{python} {_quoted(words)}"}


def _quoted(words: list[str]) -> str:
    """Return words of the shell, in which the script's variables stand for their values."""
    return " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)
