"""Pages that stand alone: an HTML file contains the styles, the scripts and, for a report, the data."""

import json
from pathlib import Path
from typing import Any

from areal.extensions.desk.panels import COLOURS

PAGES = Path(__file__).parent / "pages"
# A report asks no server, so the browser may load and send nothing.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def page(file: Path, data: Any = None) -> str:
    """Return the page in `file`, with the file NAME of PAGES in place of each `/* include NAME */`. data: plain data
    for the page, or None if the page asks its server."""
    text = file.read_text(encoding="utf-8")
    for part in PAGES.rglob("*.*"):
        mark = f"/* include {part.name} */"
        text = text.replace(mark, part.read_text(encoding="utf-8")) if mark in text else text
    # Within a script, no text of a model can end the script: no `<` is left.
    written = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    head = "<head>" if data is None else f"<head>\n{policy}"
    text = text.replace("<head>", head, 1).replace("/* colours */", json.dumps(COLOURS))
    return text.replace("/* data */", written)
