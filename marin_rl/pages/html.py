"""A page as HTML: the filled template, with the data as JSON that no text in it can close.

Jinja escapes everything but the scripts, the style sheet and the data, which are made safe where
they are made. In the browser our scripts set text, never HTML.
"""

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from marin_rl.pages.assets import STATIC, policy, scripts, style
from marin_rl.pages.records import Page

_ESCAPED = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def page_json(page: Page) -> bytes:
    """The page's data; numbers that are not finite are null."""
    return orjson.dumps(page)


def report_html(page: Page) -> str:
    """One self-contained file, which opens without a network."""
    hashes = " ".join(f"'{script.hash}'" for script in scripts())
    return _template().render(
        run_id=page.facts.run_id,
        policy=policy(hashes, connect="'none'"),
        style=Markup(style()),
        scripts=[
            {"text": Markup(script.text), "module": script.module, "source": None}
            for script in scripts()
        ],
        data=Markup(_embedded(page)),
        live=False,
    )


def live_html(run_id: str) -> str:
    """The same page without scripts and data, which it loads from the server."""
    return _template().render(
        run_id=run_id,
        policy=None,
        style=Markup(style()),
        scripts=[
            {"text": None, "module": script.module, "source": f"/assets/{script.name}"}
            for script in scripts()
        ],
        data=Markup("null"),
        live=True,
    )


def _embedded(page: Page) -> str:
    text = page_json(page).decode()
    return text.translate(str.maketrans(_ESCAPED))


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(STATIC), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html")
