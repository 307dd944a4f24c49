"""The table of extensions: the objects that a configuration, a row or a workflow names, by their kind and name.

| kind | the object |
|---|---|
| `workflow` | a workflow (`areal.workflows.builtin`) |
| `tool` | a function of `areal.workflows.tools.Tools`, with the result of `session.tool(NAME)` |
| `environment` | a class (`areal.extensions.environments`) |
| `provider` | a provider of sandboxes (`areal.extensions.sandboxes.sandbox_owner`) |
| `reward` | a reward (`areal.rewards.functions`) |
| `reward_form` | how rewards of another library are called (`areal.rewards.lookup`), of this project alone |
| `source` | a function: opens a source of rows (`areal.data.sources`) |
| `sampler` | a sampler of rows (`areal.data.samplers`) |
| `objective` | the loss of an objective (`areal.training.algorithms.objectives`) |
| `mask` | a function: chooses the tokens of a minibatch that an objective keeps; of this project alone |
| `advantage` | an estimator of advantages (`areal.training.algorithms.advantages`) |
| `division` | a class: divides a model over ranks (`areal.training.division`), of this project alone |
| `model_check` | a function of `trainer`, the model's folder and the number of ranks; raises UserError |
| the name of an extension | an object that the core needs of the extension, of this project alone |
| `role` | the class of a role (`actors.runtime.actor.Actor`); of a package: `run.py --role NAME` starts it |
| `requests` | a class: answers a role at the master (`actors.master.run_control`), of this project alone |
| `tracker` | a tracker for `observe.trackers` (`areal.extensions.trackers.tracking`) |
| `launch_target` | a class: submits a run to a scheduler (`areal.extensions.launch.targets`) |
| `commands` | a function: declares commands of `areal` (`areal.base.command_line`), of this project alone |

The entries of the core are in `extension.toml` beside this file, the entries of an extension in `extension.toml` in its
folder. The entries of an installed package are entry points in the group `areal.extensions` with names of the form
`KIND.NAME`. An object is imported at its first look-up. An entry of this project hides an equal entry of a package.
"""

import functools
import importlib.metadata
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.base import plugins
from areal.base.errors import UserError
from areal.base.text import shown

GROUP = "areal.extensions"
FILE = "extension.toml"
_ROOT = Path(__file__).parents[2]
# The core, extensions of the library, and roles that are extensions.
_FOLDERS = ("areal/base", "areal/extensions/*", "actors/*")


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the table. target: `package.module:object`. source: the folder of this project with the object,
    or the installed package and its version."""

    kind: str
    name: str
    target: str
    source: str

    def load(self, what: str | None = None) -> Any:
        """Return the object. what: the object, in messages. Raises UserError with the source if the import fails."""
        return plugins.load(self.target, f"{what or self.kind} {self.name!r} of {self.source},")


@functools.cache
def own_entries() -> dict[tuple[str, str], Entry]:
    """Return the entries of this project by kind and name."""
    entries = {}
    for file in (file for folder in _FOLDERS for file in sorted(_ROOT.glob(f"{folder}/{FILE}"))):
        for kind, named in tomllib.loads(file.read_text(encoding="utf-8")).items():
            for name, target in named.items():
                folder = Path(*target.partition(":")[0].split(".")[:-1])
                entries[kind, name] = Entry(kind, name, target, folder.as_posix())
    return entries


@functools.cache
def installed_entries() -> tuple[Entry, ...]:
    """The entries of installed packages, sorted. Raises UserError if a name of an entry point has no kind."""
    entries = []
    for point in importlib.metadata.entry_points(group=GROUP):
        kind, dot, name = point.name.partition(".")
        source = f"{point.dist.name} {point.dist.version}" if point.dist else "an installed package"
        if not (kind and dot and name):
            raise UserError(
                f"The entry point {point.name!r} in the group {GROUP} of {source} is not of the form KIND.NAME: "
                f"correct it there, or uninstall {source.partition(' ')[0]}"
            )
        entries.append(Entry(kind, name, point.value, source))
    return tuple(sorted(entries, key=lambda entry: (entry.kind, entry.name, entry.source)))


def names(kind: str) -> list[str]:
    """Return the names of all entries of a kind: first the names of this project, then of installed packages."""
    entries = [*own_entries().values(), *installed_entries()]
    return [*dict.fromkeys(entry.name for entry in entries if entry.kind == kind)]


def entry(kind: str, name: str) -> Entry | None:
    """Return the entry of a kind and name; None without an entry. Raises UserError if two packages have the entry."""
    if (kind, name) in own_entries():
        return own_entries()[kind, name]
    installed = [entry for entry in installed_entries() if (entry.kind, entry.name) == (kind, name)]
    if len(installed) > 1:
        packages = " and ".join(entry.source for entry in installed)
        raise UserError(f"Both {packages} have a {kind} {name!r}: uninstall one of them, or name package.module:object")
    return installed[0] if installed else None


def find(kind: str, name: str, what: str | None = None) -> Any:
    """Return the object of `name`: an entry of the table, or a user's object, named `package.module:object` or
    `path/to/file.py:object`.

    what: the object in messages, such as "The workflow"; the kind by default. Raises UserError if the
    object is missing, or cannot be imported.
    """
    if ":" in name:
        return plugins.load(name, what or kind)
    if named := entry(kind, name):
        return named.load(what)
    if name.endswith(".py"):
        raise UserError(f"the {kind} {name!r} is a file: name what is in it, {name}:NAME")
    raise UserError(
        f"there is no {kind} {name!r}: name one of {', '.join(names(kind))}, or your own as package.module:object or "
        f"path/to/file.py:object"
    )


def need(kind: str, name: str, what: str, extension: str | None = None) -> Entry:
    """Return an entry that the core needs of an extension, which the user may have removed. what: the part that needs
    it, in messages. extension: the extension's name; None: the kind, or the name of the role. Raises UserError if the
    entry is missing."""
    if not (named := own_entries().get((kind, name))):
        of = extension or (name if kind == "role" else kind)
        raise UserError(f"{what} needs the extension `{of}`, whose folder is missing: put it back, or do without")
    return named


def part_of(extension: str, name: str) -> Any:
    """Return the object that an extension of this project has as `name`; None if the extension was removed."""
    named = own_entries().get((extension, name))
    return named and named.load()


def find_own(kind: str) -> list[Any]:
    """Return the objects of all entries of this project of a kind."""
    return [entry.load() for entry in own_entries().values() if entry.kind == kind]


def print_entries(options: Any) -> None:
    """`areal extensions`: print the kind, the name and the source of all entries."""
    entries = [*own_entries().values(), *installed_entries()]
    rows = [("kind", "name", "from"), *sorted((entry.kind, entry.name, entry.source) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for kind, name, source in rows:
        print(shown(f"{kind:<{widths[0]}}  {name:<{widths[1]}}  {source}"))
