"""The site of the docs: it builds without a warning, has every page, and needs no network."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

TOP = Path(__file__).parent.parent
CONFIG = TOP / "docs/site/mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make site` does, in a folder of its own. Every warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "-f", CONFIG, "--site-dir", folder],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def entries(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(each)


def test_every_page_of_the_docs_is_in_the_navigation():
    settings = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    listed = list(entries(settings["nav"]))
    assert len(listed) == len(set(listed))
    assert {page.name for page in (TOP / "docs").glob("*.md")} <= set(listed)


@pytest.mark.slow
def test_every_page_is_built_and_nothing_is_loaded_from_a_network(site):
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    assert pages >= {f"{page.stem}.html" for page in (TOP / "docs").glob("*.md")} | {"index.html"}
    loads = re.compile(
        r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//[^>]*>"""
        r"""|<link[^>]*\shref=["']?(?:https?:)?//[^>]*>|@import[^;]*//|url\(["']?(?:https?:)?//"""
    )
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not loads.findall(file.read_text(encoding="utf-8")), file.name
