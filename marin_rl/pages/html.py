"""A page as HTML: the filled template, its scripts and style, and the data as JSON.

Plotly draws the curves and DataTables (as itables bundles it) the table of rollouts; both are MIT
and are taken from the installed packages, so that a page needs no network. Scripts are named by
hash in the page's Content-Security-Policy: nothing else can run, for any text of a rollout. Jinja
escapes everything but the scripts, the style sheet and the data, which are made safe here. In the
browser our scripts set text, never HTML.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from marin_rl.errors import InputError
from marin_rl.pages.records import Page

STATIC = Path(__file__).parent / "static"
OWN_SCRIPTS = ("dom.js", "charts.js", "tokens.js", "rollout.js", "table.js", "groups.js", "main.js")

_EXPORT = re.compile(r"export\s*\{[^}]*?(?P<name>[\w$]+) as default[^}]*\};?")
_ESCAPED = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script that is safe inside a `<script>` element, and its hash for the policy."""

    name: str
    text: Markup
    module: bool

    @property
    def hash(self) -> str:
        digest = hashlib.sha256(self.text.encode()).digest()
        return f"sha256-{base64.b64encode(digest).decode()}"


@cache
def scripts() -> tuple[Script, ...]:
    """The scripts of a page in the order they run. Raises InputError where a package is missing."""
    own = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in OWN_SCRIPTS)
    plotly = _package_file("plotly", "package_data/plotly.min.js").read_text(encoding="utf-8")
    path = _package_file("itables", "html/dt_bundle.js")
    text, replaced = _EXPORT.subn(
        lambda match: f"window.DataTable={match['name']};", path.read_text(encoding="utf-8")
    )
    if replaced != 1:
        raise InputError(
            f"{path}: expected one export list with a default, found {replaced}: this version of "
            "itables is not the one that constraints.txt names; reinstall marin-rl"
        )
    return (
        Script(name="plotly.js", text=_inlined(plotly), module=False),
        Script(name="tables.js", text=_inlined(text), module=True),
        Script(name="page.js", text=_inlined(own), module=True),
    )


@cache
def style() -> str:
    """The style sheet: that of the table, then ours."""
    bundle = _package_file("itables", "html/dt_bundle.css").read_text(encoding="utf-8")
    own = (STATIC / "page.css").read_text(encoding="utf-8")
    sheet = f"{bundle}\n{own}"
    assert "</style" not in sheet.lower(), "a style sheet has no end tag in it"
    return sheet


def policy(script_sources: str, connect: str) -> str:
    """A Content-Security-Policy that allows these scripts alone."""
    return (
        f"default-src 'none'; script-src {script_sources}; style-src 'unsafe-inline'; "
        f"img-src data:; font-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


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


def _inlined(script: str) -> Markup:
    """Escape the two sequences that a `<script>` element interprets.

    Both can only occur inside strings, templates, regular expressions and comments, where a
    backslash before these characters changes nothing.
    """
    text = script.replace("<!--", r"<\!--")
    return Markup(re.sub(r"</(?=script)", r"<\\/", text, flags=re.IGNORECASE))


def page_json(page: Page) -> bytes:
    return orjson.dumps(page)


def report_html(page: Page) -> str:
    """Render a self-contained file, which opens without a network."""
    hashes = " ".join(f"'{script.hash}'" for script in scripts())
    embedded = page_json(page).decode().translate(str.maketrans(_ESCAPED))
    return _render(page.facts.run_id, embedded, content_policy=policy(hashes, connect="'none'"))


def live_html(run_id: str) -> str:
    return _render(run_id, "null", content_policy=None)


def _render(run_id: str, data: str, *, content_policy: str | None) -> str:
    """Fill the template; a page without a content policy is a live one."""
    environment = Environment(
        loader=FileSystemLoader(STATIC), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        run_id=run_id,
        policy=content_policy,
        style=Markup(style()),
        scripts=scripts(),
        data=Markup(data),
        live=content_policy is None,
    )
