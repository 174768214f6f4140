"""Check of metrics.jsonl against the committed metrics.

The file is a convenience and no commit, and a killed process leaves a torn line in it, or none. But
a line that says something else than the metrics of its round was altered, and a line of a round
without metrics proves that there were some.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from marin_rl.errors import CorruptObject, ObjectMissing
from marin_rl.storage.layout import metrics_key
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.tables.metrics import JSONL_KEY, json_line
from marin_rl.storage.tables.parquet import TableReader, load
from marin_rl.storage.upkeep.integrity import Fault
from marin_rl.storage.upkeep.inventory import Inventory

_BEGUN = re.compile(rb'\{"round": (\d{1,9}), ')
_TORN = re.compile(rb'\{"round": \d{0,9},?')  # before it is known which round it was to be of


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLines:
    """The lines of a run's metrics.jsonl, by the round that each says it is of.

    `faults` are about lines that are of none, or about the file.
    """

    place: str = ""
    by_round: dict[int, list[bytes]] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    def compared(self, reader: TableReader, round: int) -> Fault | None:
        """Faults of the lines of a round, compared with its metrics."""
        lines = self.by_round.get(round)
        if not lines:
            return None
        expected = json_line(reader.table(reader.schema).to_pylist()[0])
        for line in lines:
            if not expected.startswith(line):  # a torn one is its beginning
                detail = f"its line of round {round} is not what {metrics_key(round)} says"
                return Fault("altered", self.place, detail)
        return None

    def unclosed(self, store: ObjectStore, inventory: Inventory) -> Iterator[Fault]:
        """Rounds with a whole line, whose metrics are gone."""
        for round in sorted(self.by_round.keys() - inventory.closed):
            if any(line.endswith(b"}") for line in self.by_round[round]):
                detail = f"{JSONL_KEY} has a line of that round"
                yield Fault("missing", store.url_of(metrics_key(round)), detail)


def read_lines(store: ObjectStore, inventory: Inventory) -> MetricsLines:
    """The lines of metrics.jsonl, as they are; none where the run has no such file."""
    if JSONL_KEY not in inventory.keys:
        return MetricsLines()
    place = store.url_of(JSONL_KEY)
    try:
        data = load(store, JSONL_KEY).to_pybytes()
    except ObjectMissing:
        return MetricsLines()
    except CorruptObject as error:
        return MetricsLines(place=place, faults=(Fault("malformed", place, str(error)),))
    by_round: dict[int, list[bytes]] = {}
    faults: list[Fault] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        match = _BEGUN.match(line)
        if match is not None:
            by_round.setdefault(int(match[1]), []).append(line)
        # A killed process may have written any beginning of a line.
        elif line and _TORN.fullmatch(line) is None and not b'{"round": '.startswith(line):
            detail = f"line {number} is no metrics of a round: {line[:40]!r}"
            faults.append(Fault("altered", place, detail))
    # A file of another kind would fill pages: a few lines show that.
    return MetricsLines(place=place, by_round=by_round, faults=tuple(faults[:20]))
