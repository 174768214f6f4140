"""Provenance for a page: the slots of each round with their digests and parents, and the run.

Read from manifests alone. A digest that a page shows can be compared with the files by
`sha256sum`: it is that of the manifest, or of the part.
"""

import json
import re
from typing import Any

import yaml

from marin_rl.pages.records import Facts, Slot
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot, evals_slot, rollouts_slot
from marin_rl.storage.stores.filesystem import open_store
from schemas.manifests import Manifest

ARRAYS_SHOWN_MAX = 16  # files of a checkpoint, which may have thousands; shards are all shown

_SECRET = re.compile("secret|passw|token|key|credential|sign", re.IGNORECASE)


def round_slots(run: Run, round: int) -> dict[str, Slot]:
    """The committed slots of a round: the policy, its rollouts, batches, the policy after it.

    By what they are to the round.
    """
    titles = {
        checkpoint_slot(round): "policy that sampled",
        evals_slot(round): "held-out evaluation of it",
        rollouts_slot(round): "rollouts",
        batches_slot(round): "batches and dispositions",
        checkpoint_slot(round + 1): "policy after training",
    }
    found = [(title, read_manifest(run.store, slot)) for slot, title in titles.items()]
    return {title: slot_of(*item) for title, item in found if item}


def slot_of(manifest: Manifest, sha256: str) -> Slot:
    """A manifest as it is shown."""
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
    """The head of a page from run.json and from what is known of the run's progress."""
    record: dict[str, Any] = json.loads(run.store.read(RUN_KEY))
    config = record["config"]
    config["storage_options"] = without_secrets(config["storage_options"])
    environment = config["environment"]
    return Facts(
        run_id=run.run_id,
        root=run.store.url,
        headline=headline,
        lines=list(lines.items()),
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        content_digest=record["content_digest"],
        shared=[(a.run_id, a.through_round, _digest_of(run, a.run_id)) for a in run.ancestors],
        environment=[(name, _told(value)) for name, value in environment.items()],
        code=[(name, str(value)) for name, value in record["code"].items()]
        + [("created", record["created_at"]), ("seed", str(record["seeds"]["run"]))],
        libraries=[(name, str(value)) for name, value in record["libraries"].items()],
    )


def _digest_of(run: Run, ancestor: str) -> str:
    """Digest of the configuration of an ancestor."""
    folder = open_store(run.config.root, run.config.storage_options).at(ancestor)
    return str(json.loads(folder.read(RUN_KEY))["content_digest"])


def without_secrets(node: Any, name: str = "") -> Any:
    """Storage options as a page may show them: it is made to be passed on."""
    if isinstance(node, dict):
        return {key: without_secrets(value, str(key)) for key, value in node.items()}
    return "(not shown)" if _SECRET.search(name) and node is not None else node


def _told(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, indent=1)
