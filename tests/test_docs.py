"""Documentation that is generated, or that lists files, matches the code."""

import re
from pathlib import Path

import pytest

from marin_rl.analysis.reference import configuration_markdown, metrics_markdown
from marin_rl.serving.http.prometheus import telemetry_markdown

TOP = Path(__file__).parent.parent
ROOMS = ("marin_rl", "flows", "tasks", "schemas")
README = (TOP / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "made"),
    [("configuration.md", configuration_markdown), ("metrics.md", metrics_markdown)],
    ids=["configuration", "metrics"],
)
def test_a_generated_page_is_what_the_code_says(page, made):
    assert (TOP / "docs" / page).read_text(encoding="utf-8") == made(), "run `make docs`"


def test_the_servers_metrics_are_documented_as_the_code_has_them():
    page = (TOP / "docs/serving.md").read_text(encoding="utf-8")
    assert telemetry_markdown() in page


def test_the_tree_in_the_readme_names_every_room():
    tree = README[README.index("## The tree") :]
    named = set(re.findall(r"^ *([a-z_]+)/ ", tree, re.MULTILINE))
    library = {path.parent.name for path in (TOP / "marin_rl").glob("*/__init__.py")}
    assert named >= library | set(ROOMS)
    assert not {name for name in named if not (TOP / name).is_dir()} - library
    assert len(tree.splitlines()) <= 40


def test_links_between_pages_lead_somewhere():
    for page in [TOP / "README.md", TOP / "CONTRIBUTING.md", *(TOP / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_make_target_is_documented_and_every_documented_one_exists():
    makefile = (TOP / "Makefile").read_text(encoding="utf-8")
    phony = set(re.findall(r"^\.PHONY: ([a-z-]+)", makefile, re.MULTILINE))
    explained = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert phony == explained
    texts = README + (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", texts, re.MULTILINE):
        assert target in phony


def test_every_command_in_the_readme_exists():
    from typer.main import get_command

    from marin_rl.cli import app

    known = set(get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]
    for command in re.findall(r"marin-rl ([a-z]+(?:-[a-z]+)*)", README):
        assert command in known, command
