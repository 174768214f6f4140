"""The endpoints of one client: who is ready, how full, and whom to ask next.

Pure bookkeeping. A request goes to the nearest endpoint that is not full, the least loaded first;
requests of one session go where the first of them went. Leaves out health checks (`fleet_watch`).
"""

import re
from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Literal

from marin_rl.inference.client.fleet_sources import Endpoint

SESSIONS_MAX = 65_536  # the oldest beyond these lose their place: a cache miss, no more
SLOTS_ASSUMED = 64  # of an endpoint that does not say how many sequences it decodes side by side
COUNT_MAX = 1e12  # of samples or slots: no server has more
SHOWN_MAX = 8  # endpoints that an error names

# Numbers in /metrics of marin-rl, vLLM and SGLang, whichever is there.
_WAITING = ("marin_rl_samples_queued", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
_RUNNING = ("marin_rl_slots_busy", "vllm:num_requests_running", "sglang:num_running_reqs")
_SLOTS = ("marin_rl_slots",)
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([0-9.eE+-]+)(?: \d+)?$", re.MULTILINE)

State = Literal["new", "ready", "lost", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options of a fleet that is watched."""

    zone: str | None = None  # label of near endpoints
    timeout_s: float = 300.0  # for which none may be ready
    probe_s: float = 1.0  # between two looks at an endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Work that an endpoint reports: samples that wait and run, and slots; None else."""

    waiting: int
    running: int
    slots: int | None


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """An endpoint of a fleet. `reason` says why it is not ready.

    `outstanding` are this client's samples that it has not answered; `since` is the number of
    those sent less those answered since it last reported its load; `asked` counts requests,
    `missed` the looks in a row that it left unanswered.
    """

    endpoint: Endpoint
    state: State = "new"
    reason: str = "not asked yet"
    load: Load | None = None
    outstanding: int = 0
    since: int = 0
    asked: int = 0
    missed: int = 0
    not_before: float = 0.0

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def slots(self) -> int:
        """Sequences that it decodes side by side, as far as is known."""
        reported = self.load.slots if self.load else None
        return reported or self.endpoint.slots or SLOTS_ASSUMED

    @property
    def work(self) -> int:
        """Samples that wait or run there, this client's own since then included."""
        if self.load is None:
            return self.outstanding
        # Others may have been answered since its report, so it is never below our own.
        return max(self.load.waiting + self.load.running + self.since, self.outstanding)

    @property
    def full(self) -> bool:
        return self.work >= self.slots

    def order(self) -> tuple[float, int, str]:
        """Key to sort by load; equally loaded ones in turn, so that a small round spreads too."""
        return self.work / self.slots, self.asked, self.url

    def reported(self, load: Load | None) -> None:
        self.load, self.since = load, 0

    def sent(self, samples: int) -> None:
        self.asked += 1
        self.outstanding += samples
        self.since += samples

    def answered(self, samples: int) -> None:
        self.outstanding -= samples
        self.since -= samples


@dataclass(slots=True)
class Fleet:
    """Members by URL, and the sessions that have a place. `zone` is the label of near ones.

    Members of a fleet that is not `watched`, a plain list of endpoints, are ready for good, report
    no load and are asked in turn.
    """

    zone: str | None = None
    watched: bool = True
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    _places: "OrderedDict[str, str]" = field(default_factory=OrderedDict)

    @classmethod
    def of(cls, urls: Iterable[str]) -> "Fleet":
        """A fleet of a plain list, which never changes."""
        ready = [Member(endpoint=Endpoint(url=url), state="ready", reason="") for url in urls]
        return cls(watched=False, members={member.url: member for member in ready})

    def update(self, endpoints: Iterable[Endpoint]) -> None:
        named = {endpoint.url: endpoint for endpoint in endpoints}
        for url in [url for url in self.members if url not in named]:
            # Requests that it still answers keep the object; it is asked nothing more.
            del self.members[url]
        for url, endpoint in named.items():
            member = self.members.setdefault(url, Member(endpoint=endpoint))
            was_refused = bool(member.endpoint.refused)
            member.endpoint = endpoint
            if endpoint.refused:
                member.state, member.reason = "refused", endpoint.refused
            elif was_refused:
                member.state = "new"

    @property
    def ready(self) -> list[Member]:
        return [member for member in self.members.values() if member.state == "ready"]

    def choose(self, session: str, now: float, tried: Container[str] = ()) -> Member | None:
        """The member to ask next; None while there is none. `now` is monotonic, in seconds.

        Those whose URLs a request has `tried` are asked again once no others are left.
        """
        ready = self.ready
        if not ready:
            return None
        # If all asked to be left alone, one is chosen anyway, and the request waits for it.
        willing = [member for member in ready if member.not_before <= now] or ready
        willing = [member for member in willing if member.url not in tried] or willing
        if not self.watched:
            return min(willing, key=lambda member: (max(member.not_before, now), member.asked))
        place = self._places.get(session) if session else None
        chosen = next((member for member in willing if member.url == place), None)
        if chosen is None:
            near = [m for m in willing if self.zone and m.endpoint.labels.get("zone") == self.zone]
            chosen = min(near or willing, key=Member.order)
            # A queue nearby is worse than a free slot far away.
            chosen = min(willing, key=Member.order) if chosen.full else chosen
        if session:
            self._places[session] = chosen.url
            self._places.move_to_end(session)
            while len(self._places) > SESSIONS_MAX:
                self._places.popitem(last=False)
        return chosen

    def place_of(self, session: str) -> str:
        """URL of the endpoint with a session's cache, or an empty string."""
        return self._places.get(session, "")

    def state_lines(self) -> str:
        """Every member that is not ready, and why, for an error."""
        away = [m for m in self.members.values() if m.state != "ready"]
        lines = [f"{m.url}: {m.state}, {m.reason}" for m in away[:SHOWN_MAX]]
        if len(away) > SHOWN_MAX:
            lines.append(f"and {len(away) - SHOWN_MAX} more")
        return "; ".join(lines) or "none is known"


def load_in(metrics: bytes) -> Load | None:
    """The load in the text of `/metrics`; None where it has none of the known numbers."""
    sums: dict[str, float] = {}
    for name, value in _LINE.findall(metrics.decode(errors="replace")):
        try:
            number = float(value)
        except ValueError:
            continue  # of a proxy, or a server that is broken
        if 0 <= number < COUNT_MAX:
            # A sum over labels: a server may report each of its engines.
            sums[name] = sums.get(name, 0.0) + number
    waiting, running, slots = (
        next((int(sums[name]) for name in names if name in sums), None)
        for names in (_WAITING, _RUNNING, _SLOTS)
    )
    if waiting is None and running is None:
        return None
    return Load(waiting=waiting or 0, running=running or 0, slots=slots)
