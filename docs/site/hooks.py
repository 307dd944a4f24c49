"""The README is the site's first page. The files beside it, and the page of each extension in its folder, are pages of
the site too: written once, read in two places."""

from __future__ import annotations

import re
from pathlib import Path

import configuration
from markdown_tables import cut_tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        # Their links lead into docs/, which is where their pages stand on the site.
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=with_extensions(text)))
    for page in (*ROOT.glob("areal/extensions/*/README.md"), *ROOT.glob("actors/*/README.md")):
        text = re.sub(r"\]\([\w./]*?(\w+)/README\.md", r"](\1.md", page.read_text(encoding="utf-8"))
        text = re.sub(r"\]\([./]+docs/", "](../", text)
        files.append(File.generated(config, f"extensions/{page.parent.name}.md", content=text))
    return files


def with_extensions(text: str) -> str:
    """Links to the folders of extensions, and to CONTRIBUTING.md above docs/, lead to their pages on the site."""
    text = re.sub(r"\]\((?:\.\./)?(?:areal/extensions|actors)/(\w+)/README\.md", r"](extensions/\1.md", text)
    return text.replace("](../CONTRIBUTING.md", "](CONTRIBUTING.md")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Raises PluginError for a table that would show as raw text."""
    markdown = with_extensions(configuration.reference() if page.file.src_uri == "configuration.md" else markdown)
    if lines := cut_tables(markdown):
        raise PluginError(f"{page.file.src_uri}: a blank line cuts a table in two before line {lines[0]}.")
    return markdown
