"""A run as a page, from committed slots, and the page as HTML: template, scripts, style, JSON.

A round that is sealed, batched and trained is read once: a page of a running run reads new rounds
alone. Slots are read from manifests: a digest that a page shows can be compared with the files by
`sha256sum`, as it is that of the manifest, or of the part.

Plotly draws the curves and DataTables (as itables bundles it) the table of rollouts; both are MIT
and are taken from the installed packages, so that a page needs no network. Scripts are named by
hash in the page's Content-Security-Policy: nothing else can run, for any text of a rollout. Jinja
escapes everything but the scripts, the style sheet and the data, which are made safe here. In the
browser our scripts set text, never HTML.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
import polars as pl
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from marin_rl.analysis.dialogues import BeforeAfter, before_and_after
from marin_rl.analysis.scan import scan_evals
from marin_rl.analysis.status import Followed, stage_of, status_of
from marin_rl.display.tables import evenly
from marin_rl.errors import InputError
from marin_rl.pages.charts import make_charts
from marin_rl.pages.records import Facts, Page, RoundSlots, Slot
from marin_rl.pages.rounds import Amount, RoundPart, TokenTexts, read_round
from marin_rl.rollouts.estimates import Estimate, estimate_of_groups
from marin_rl.storage import layout
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.run_progress import RoundProgress
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.runs import Run, steps_in
from marin_rl.storage.stores.filesystem import ObjectStore, open_store
from schemas.manifests import Manifest

ARRAYS_SHOWN_MAX = 16  # files of a checkpoint, which may have thousands; shards are all shown
TOKENS_OF_A_PAGE = 400_000
CHARACTERS_OF_A_PAGE = 2_500_000
TOKENS_MAX, CHARACTERS_MAX = 2048, 20_000

_SECRET = re.compile("secret|passw|token|key|credential|sign", re.IGNORECASE)

Key = tuple[bool, bool, Amount]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Number of rollouts a page shows: of each shown round, and of the run."""

    groups_per_round: int = 4
    members_per_group: int = 4
    rollouts_max: int = 1600

    @property
    def _of_round(self) -> int:
        return max(1, self.groups_per_round * self.members_per_group)

    def rounds_max(self) -> int:
        return max(1, self.rollouts_max // self._of_round)

    def amount(self, rounds: int) -> Amount:
        """Amount of one round that keeps a page of `rounds` rounds small enough for browsers."""
        count = self._of_round * min(max(rounds, 1), self.rounds_max())
        return Amount(
            groups=self.groups_per_round,
            members=self.members_per_group,
            tokens=max(64, min(TOKENS_MAX, TOKENS_OF_A_PAGE // count)),
            characters=max(400, min(CHARACTERS_MAX, CHARACTERS_OF_A_PAGE // count)),
        )


class RunPage:
    """The page of one run; `page()` returns its present state. Not thread safe."""

    def __init__(self, run: Run, choice: Choice | None = None) -> None:
        self._run, self._choice = run, choice or Choice()
        self._followed = Followed(run)
        self._times_begun = self._followed.times_begun
        self._texts = TokenTexts(run.config.policy)
        self._parts: dict[int, tuple[Key, RoundPart]] = {}
        self._slots: dict[int, dict[str, Slot]] = {}
        self._held_out: dict[int, Estimate] = {}
        self._before_after: BeforeAfter | None = None
        self._steps: dict[str, list[dict[str, Any]]] = {}  # by phase

    def page(self) -> Page:
        """The committed state. Raises CorruptObject, NewerSchema, StoreUnavailable."""
        run, committed = self._run, self._followed.progress()
        status = status_of(self._followed, committed)
        if self._followed.times_begun != self._times_begun:
            # The folder has another run of the same name now.
            self._times_begun = self._followed.times_begun
            for kept in (self._parts, self._slots, self._held_out, self._steps):
                kept.clear()
            self._before_after = None
        stage = stage_of(run, committed)
        sealed = [number for number in committed if committed[number].rollouts]
        shown = evenly(sealed, self._choice.rounds_max())
        amount = self._choice.amount(status.planned)
        for number in sealed:
            own = amount if number in shown else Amount(groups=0)
            key = (committed[number].batches, _trained(number, committed), own)
            if self._parts.get(number, (None, None))[0] != key:
                self._parts[number] = (key, read_round(run, number, own, self._texts))
        parts = [self._parts[number][1] for number in sealed]
        self._read_evaluations(committed)
        charts, absent = make_charts(
            status.rounds,
            {part.round: part.reward for part in parts if part.reward is not None},
            dict(sorted(self._held_out.items())),
            self._phases(begun=bool(committed)),
        )
        lines = {k: v for k, v in status.facts.items() if k not in ("root", "in progress")}
        lines["rollouts"] = f"{sum(part.rollouts for part in parts):,}"
        slots = {n: self._slots.get(n) or round_slots(run, n) for n in shown}
        self._slots |= {n: own for n, own in slots.items() if _trained(n, committed)}
        return Page(
            facts=facts_of(run, status.headline, lines),
            charts=charts,
            absent=absent,
            groups=[group for part in parts for group in part.groups],
            rounds=[
                RoundSlots(round=number, slots=[(title, slot.name) for title, slot in own.items()])
                for number, own in slots.items()
            ],
            slots={slot.name: slot for own in slots.values() for slot in own.values()},
            notes=self._notes(parts),
            held_out=self._before_after,
            tokenizer_digest=self._texts.digest,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            stage="" if stage.ended else stage.text,
            ended=stage.ended,
        )

    def _phases(self, *, begun: bool) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Metrics of the checkpoints of phases of steps; those before rounds that have `begun`
        are read once.
        """
        config = self._run.config
        slots = {
            "sft": layout.sft_slot if config.policy.init == "sft" else None,
            "reward_model": layout.reward_model_slot if config.reward_model else None,
            "preference": layout.preference_slot if config.preference else None,
        }
        for phase, slot_of in slots.items():
            if slot_of is not None and not (begun and phase in self._steps):
                slots_of = steps_in(self._run, slot_of)
                steps = ((n, read_manifest(self._run.store, slot)) for slot, n in slots_of)
                self._steps[phase] = [{"step": n, **made[0].totals} for n, made in steps if made]
        return self._steps

    def _read_evaluations(self, committed: dict[int, RoundProgress]) -> None:
        new = [n for n in committed if committed[n].evaluation and n not in self._held_out]
        if not new:
            return
        run = self._run
        scanned = scan_evals(run.config.root, run.run_id, dict(run.config.storage_options))
        wanted = scanned.filter(pl.col("round").is_in(new))
        frame = wanted.select("round", "example_id", "reward").collect()
        for (number,), rows in frame.group_by("round"):
            groups = rows.group_by("example_id").agg("reward")["reward"].to_list()
            usable = [[r for r in group if r is not None and math.isfinite(r)] for group in groups]
            reward = estimate_of_groups(usable)
            if reward is not None:
                self._held_out[int(number)] = reward  # type: ignore[arg-type]  # an int column
        self._before_after = before_and_after(run)

    def _notes(self, parts: Sequence[RoundPart]) -> list[str]:
        shown = [part for part in parts if part.groups]
        cards = sum(len(group.cards) for part in shown for group in part.groups)
        total = sum(part.rollouts for part in parts)
        every = len(shown) == len(parts)
        rounds = "every round" if every else f"{len(shown)} of {len(parts)} rounds"
        notes = [
            f"Shown: {cards:,} of {total:,} rollouts, from {rounds}: the group whose rewards "
            "differ most, those with the lowest and the highest mean, then others in order; of "
            "each its best, its worst, then others in order. Nothing is picked by chance. Curves "
            "are over all rollouts."
        ]
        digests = {part.tokenizer_digest for part in shown} - {""}
        if self._texts.problem:
            notes.append(f"Tokens are shown by their ids: {self._texts.problem}")
        elif digests - {self._texts.digest}:
            notes.append(
                "Tokens are read with another tokenizer than the rollouts were sampled with: "
                f"expected {', '.join(sorted(digests))}, found {self._texts.digest}."
            )
        return notes


def _trained(number: int, committed: dict[int, RoundProgress]) -> bool:
    return number + 1 in committed and committed[number + 1].checkpoint


def round_slots(run: Run, round: int) -> dict[str, Slot]:
    """The committed slots of a round by their part in it, in the order they were made."""
    titles = {
        layout.checkpoint_slot(round): "policy that sampled",
        layout.evals_slot(round): "held-out evaluation of it",
        layout.rollouts_slot(round): "rollouts",
        layout.batches_slot(round): "batches and dispositions",
        layout.checkpoint_slot(round + 1): "policy after training",
    }
    manifests = [(title, read_manifest(run.store, slot)) for slot, title in titles.items()]
    return {title: slot_of(*item) for title, item in manifests if item}


def slot_of(manifest: Manifest, sha256: str) -> Slot:
    rows = manifest.totals.get("rows")
    shown = ARRAYS_SHOWN_MAX if manifest.slot.startswith("checkpoints/") else None
    return Slot(
        name=manifest.slot,
        sha256=sha256,
        created_at=manifest.created_at,
        attempt=manifest.attempt,
        bytes=sum(part.bytes for part in manifest.parts),
        rows=None if rows is None else int(rows),
        parents=[(parent.slot, parent.sha256) for parent in manifest.parents],
        parts=[(part.name, part.sha256) for part in manifest.parts[:shown]],
        n_parts=len(manifest.parts),
        digest=str(manifest.extra.get("parameters_digest", "")),
    )


def facts_of(run: Run, headline: str, lines: dict[str, str]) -> Facts:
    """The head of a page from run.json, and `headline` and `lines` on the run's progress."""
    top = open_store(run.config.root, run.config.storage_options)
    record = _record(run.folder)
    config = record["config"]
    config["storage_options"] = without_secrets(config["storage_options"])
    return Facts(
        run_id=run.run_id,
        root=run.store.url,
        headline=headline,
        lines=list(lines.items()),
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        content_digest=record["content_digest"],
        shared=[
            (a.run_id, a.through_round, _record(top.at(a.run_id))["content_digest"])
            for a in run.ancestors
        ],
        environment=[
            (name, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False, indent=1))
            for name, v in config["environment"].items()
        ],
        code=[(name, str(value)) for name, value in record["code"].items()]
        + [("created", record["created_at"]), ("seed", str(record["seeds"]["run"]))],
        libraries=[(name, str(value)) for name, value in record["libraries"].items()],
    )


def _record(folder: ObjectStore) -> dict[str, Any]:
    return json.loads(folder.read(RUN_KEY))


def without_secrets(node: Any, name: str = "") -> Any:
    """Storage options without secrets, for a page may be passed on."""
    if isinstance(node, dict):
        return {key: without_secrets(value, str(key)) for key, value in node.items()}
    return "(not shown)" if _SECRET.search(name) and node is not None else node


STATIC = Path(__file__).parent / "static"
OWN_SCRIPTS = ("dom.js", "charts.js", "tokens.js", "rollout.js", "table.js", "groups.js", "main.js")

_EXPORT = re.compile(r"export\s*\{[^}]*?(?P<name>[\w$]+) as default[^}]*\};?")
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


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
    files = (_package_file("itables", "html/dt_bundle.css"), STATIC / "page.css")
    sheet = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert "</style" not in sheet.lower(), "a style sheet has no end tag in it"
    return sheet


def policy(script_sources: str, connect: str) -> str:
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


def report_html(page: Page) -> str:
    """Render a self-contained file, which opens without a network."""
    hashes = " ".join(f"'{script.hash}'" for script in scripts())
    embedded = orjson.dumps(page).decode().translate(_ESCAPED)
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
