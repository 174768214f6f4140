"""Pages of the site that are no files of docs/: the first page, and one per module of the API.

mkdocs calls these functions by their names while it builds (docs/site/mkdocs.yml, `hooks`).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

TOP = Path(__file__).parents[2]
# Pages of the top folder, by the name under which the site has them.
COPIED = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
# Tables and commands of 100 columns fit on a screen of 1440 pixels.
STYLE = """
.md-grid { max-width: 84rem; }
.md-typeset { font-size: .76rem; }
.md-typeset table:not([class]) code { word-break: normal; }
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the top folder and a page for each module that the navigation lists."""
    for name, source in COPIED.items():
        files.append(File.generated(config, name, content=_for_site(source)))
    shim = Path(__file__).with_name("iframe-worker.js")
    files.append(File.generated(config, "assets/iframe-worker.js", abs_src_path=str(shim)))
    files.append(File.generated(config, "assets/site.css", content=STYLE))
    for module in _modules(config.nav):
        page = File.generated(config, f"api/{module}.md", content=f"# {module}\n\n::: {module}\n")
        files.append(page)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to pages of the top folder at the site's own copies."""
    return re.sub(r"\]\(\.\./(CONTRIBUTING|CHANGELOG)\.md", r"](\1.md", markdown)


def _for_site(source: str) -> str:
    """Return a page of the top folder with its links as they are from docs/."""
    return (TOP / source).read_text(encoding="utf-8").replace("](docs/", "](")


def _modules(nav: Any) -> Iterator[str]:
    """Yield the modules of all entries `api/MODULE.md` of the navigation."""
    if isinstance(nav, str) and nav.startswith("api/"):
        yield nav.removeprefix("api/").removesuffix(".md")
    elif isinstance(nav, list):
        for entry in nav:
            yield from _modules(entry)
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from _modules(entry)
