"""Assets of a page besides its data: two libraries from pinned packages, and our own files.

Plotly draws the curves and DataTables (as itables bundles it) the table of rollouts; both are MIT
and are taken from the installed packages, so that a page needs no network. Scripts are named by
hash in the page's Content-Security-Policy: nothing else can run, for any text of a rollout.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from marin_rl.errors import InputError

STATIC = Path(__file__).parent / "static"
OWN_SCRIPTS = ("dom.js", "charts.js", "tokens.js", "rollout.js", "table.js", "groups.js", "main.js")

_EXPORT = re.compile(r"export\s*\{[^}]*?(?P<name>[\w$]+) as default[^}]*\};?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script that is safe to stand inside a `<script>` element, and its hash for the policy."""

    name: str
    text: str
    module: bool

    @property
    def hash(self) -> str:
        """As Content-Security-Policy names it."""
        digest = hashlib.sha256(self.text.encode()).digest()
        return f"sha256-{base64.b64encode(digest).decode()}"


@cache
def scripts() -> tuple[Script, ...]:
    """The scripts of a page in the order they run. Raises InputError where a package is missing."""
    own = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in OWN_SCRIPTS)
    return (
        Script(name="plotly.js", text=_inlined(_plotly()), module=False),
        Script(name="tables.js", text=_inlined(_tables()), module=True),
        Script(name="page.js", text=_inlined(own), module=True),
    )


@cache
def style() -> str:
    """The style sheet: that of the table, then ours."""
    bundle = _package_file("itables", "html/dt_bundle.css").read_text(encoding="utf-8")
    own = (STATIC / "page.css").read_text(encoding="utf-8")
    return _no_end_of_style(f"{bundle}\n{own}")


def policy(script_sources: str, connect: str) -> str:
    """A Content-Security-Policy that lets in nothing but these scripts."""
    return (
        f"default-src 'none'; script-src {script_sources}; style-src 'unsafe-inline'; "
        f"img-src data:; font-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _plotly() -> str:
    return _package_file("plotly", "package_data/plotly.min.js").read_text(encoding="utf-8")


def _tables() -> str:
    """DataTables' module with its default export put where the page's script finds it."""
    path = _package_file("itables", "html/dt_bundle.js")
    text, replaced = _EXPORT.subn(
        lambda match: f"window.DataTable={match['name']};", path.read_text(encoding="utf-8")
    )
    if replaced != 1:
        raise InputError(
            f"{path}: expected one export list with a default, found {replaced}: this version of "
            "itables is not the one that constraints.txt names; reinstall marin-rl"
        )
    return text


def _package_file(package: str, name: str) -> Path:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / name
        if path.is_file():
            return path
    raise InputError(
        f"pages need {name} of the package {package!r}, which is not installed as it should be: "
        "reinstall marin-rl (`make install`)"
    )


def _inlined(script: str) -> str:
    """The same script without the two sequences that a `<script>` element would take for its own.

    Both can only stand inside strings, templates, regular expressions and comments, where a
    backslash before these characters changes nothing.
    """
    return re.sub(r"</(?=script)", r"<\\/", script.replace("<!--", r"<\!--"), flags=re.IGNORECASE)


def _no_end_of_style(text: str) -> str:
    assert "</style" not in text.lower(), "a style sheet has no end tag in it"
    return text
