"""Preference pairs out of committed rollouts: the best against the worst member of each group."""

from collections.abc import Sequence

from marin_rl.errors import InputError
from marin_rl.finite import fit_rewards
from marin_rl.rollouts.trajectories import last_completion
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import groups_of, iter_shards
from marin_rl.types import PreferencePair, Rollout, RolloutGroup


def pairs_of_run(
    run: Run,
    *,
    component: str | None = None,
    margin_min: float = 0.0,
    rounds: Sequence[int] | None = None,
) -> list[PreferencePair]:
    """A pair of every group of the sealed rounds (all, or `rounds`) that gives one, in order.

    See `pair_of_group`; tokens are the rollouts' own. Raises InputError where no group gives a
    pair, naming the components there are; ObjectMissing for a round that is not sealed.
    """
    chosen = [p.round for p in progress(run).values() if p.rollouts] if rounds is None else rounds
    pairs: list[PreferencePair] = []
    names: set[str] = set()
    for round in chosen:
        for table in iter_shards(run, round):
            digests = table["tokenizer_digest"][0].as_py(), table["chat_template_digest"][0].as_py()
            for group in groups_of(table):
                names |= {part.name for r in group.rollouts for part in r.reward_components}
                pair = pair_of_group(group, component, margin_min, digests, run.run_id)
                pairs += [] if pair is None else [pair]
    if not pairs:
        criterion = "the reward" if component is None else f"the component {component!r}"
        raise InputError(
            f"run {run.run_id!r}: in no group of {len(chosen)} sealed rounds do two members differ "
            f"by {criterion}, and by at least {margin_min:g}; components there: "
            f"{', '.join(sorted(names)) or 'none'}"
        )
    return pairs


def pair_of_group(
    group: RolloutGroup,
    component: str | None,
    margin_min: float,
    digests: tuple[str, str],
    source: str,
) -> PreferencePair | None:
    """The best and the worst member of a group by a reward component (None: by the reward).

    None where fewer than two members have it, where they differ by nothing or by less than
    `margin_min`, or where both gave the same answer. The first of equals counts. `digests` are
    those of tokenizer and chat template.
    """
    valued = list[tuple[float, Rollout]]()
    for rollout in group.rollouts:
        values = [part.value for part in rollout.reward_components if part.name == component]
        value = rollout.reward if component is None else next(iter(values), None)
        if len(rollout.token_ids) and value is not None and fit_rewards(value):
            valued.append((value, rollout))
    if len(valued) < 2:
        return None
    best, chosen = max(valued, key=lambda item: item[0])
    worst, rejected = min(valued, key=lambda item: item[0])
    if best - worst < margin_min or best == worst:
        return None
    if chosen.last_segment.tolist() == rejected.last_segment.tolist():
        return None
    return PreferencePair(
        id=f"{source}/{group.group_id}",
        messages=group.example.messages,
        chosen=last_completion(chosen) or "",
        rejected=last_completion(rejected) or "",
        source=source,
        chosen_id=chosen.rollout_id,
        rejected_id=rejected.rollout_id,
        chosen_reward=best,
        rejected_reward=worst,
        chosen_token_ids=chosen.last_segment,
        rejected_token_ids=rejected.last_segment,
        tokenizer_digest=digests[0],
        chat_template_digest=digests[1],
    )
