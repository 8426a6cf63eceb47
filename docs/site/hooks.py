"""Hooks of mkdocs: pages from outside docs/, reference pages from the code, links that also work on GitHub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from reference import PAGES
from repository import RESULTS, Repository, links_of

PICTURE = re.compile(r"^!\[([^\]]*)\]\(([^)]+\.svg)\)$", flags=re.MULTILINE)
"""A drawing on a line of its own."""

_REPOSITORY = Repository(Path(__file__).parents[2])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every page of results in the navigation, below the first."""
    for section in config.nav or []:
        if "Results" in section:
            section["Results"] = [RESULTS, *_REPOSITORY.results()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and whatever else of the repository a page links to."""
    for uri in _REPOSITORY.pages:
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=_REPOSITORY.text(uri)))
    for page in files.documentation_pages():
        for target in links_of(page.content_string):
            path = _REPOSITORY.resolve(page.src_uri, target)
            if path is not None and files.get_file_from_path(uri := _REPOSITORY.uri(path)) is None:
                content = _REPOSITORY.source(path)
                files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Finish a page: links lead to pages of the site, drawings take its colours, reference pages get their tables."""
    uri = page.file.src_uri
    markdown = _REPOSITORY.relink(markdown, uri)
    markdown = PICTURE.sub(lambda found: _drawn(Path(config.docs_dir, uri).parent / found[2], found[1]), markdown)
    make = PAGES.get(uri)
    return markdown if make is None else f"{markdown.rstrip()}\n\n{make()}"


def _drawn(path: Path, title: str) -> str:
    """The text of a drawing within the page, so that it sees the page's colours."""
    text = re.sub(r"<\?xml.*?\?>|\n\s*", "", path.read_text(encoding="utf-8"))
    return f'<figure class="drawing" role="img" aria-label="{title}">{text}</figure>'
