"""`areal docs`: the pages of the documentation, which a wheel contains."""

import re
import sys
from argparse import Namespace
from difflib import get_close_matches
from pathlib import Path

from areal.base.errors import UserError

ROOM = Path(__file__).parents[1]
# In a clone a link to the folder `docs`; in a wheel a copy.
PAGES = ROOM / "docs"


def all_pages() -> dict[str, Path]:
    """Return the pages of `docs/` by name, and each extension's page by the name of its folder (`docs/` wins)."""
    folders = [*ROOM.glob("extensions/*/README.md"), *ROOM.parent.glob("actors/*/README.md")]
    extensions = {path.parent.name: path for path in sorted(folders)}
    return extensions | {path.stem: path for path in sorted(PAGES.glob("*.md"))}


def print_page(options: Namespace) -> None:
    """Print a page, or the names of all pages. Raises UserError if no page has the name."""
    pages = all_pages()
    if options.page is None:
        for name, path in pages.items():
            print(f"{name:<14} {_first_sentence(path.read_text(encoding='utf-8'))}")
        return
    name = Path(options.page).stem
    if name not in pages:
        close = get_close_matches(name, pages, 1)
        raise UserError(f"There is no page {name!r}: name {close[0] if close else 'one of ' + ', '.join(pages)}.")
    text = pages[name].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        return print(text, end="")
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text))


def _first_sentence(page: str) -> str:
    """The first sentence of a page below its title."""
    paragraph = page.split("\n\n")[1]
    return re.split(r"(?<=\.)\s", " ".join(paragraph.split()))[0]
