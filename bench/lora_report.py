"""Lines of JSON of the LoRA benchmark: what was measured, and what is asked for."""

import json
import sys
from typing import Any


class Report:
    """Prints measurements, and remembers whether one missed what is asked for."""

    def __init__(self) -> None:
        self.missed = list[str]()

    def add(
        self,
        name: str,
        value: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        **facts: Any,
    ) -> None:
        """Print one line; `at_most` or `at_least` is what is asked for, if anything is."""
        line: dict[str, Any] = {"measure": name, "value": round(value, 4)}
        asked = {"at_most": at_most, "at_least": at_least}
        for bound, limit in asked.items():
            if limit is not None:
                met = value <= limit if bound == "at_most" else value >= limit
                line |= {bound: limit, "met": met}
                self.missed += [] if met else [name]
        rounded = {key: round(v, 4) if isinstance(v, float) else v for key, v in facts.items()}
        sys.stdout.write(json.dumps({**line, **rounded}) + "\n")
        sys.stdout.flush()
