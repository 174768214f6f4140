"""Rollouts that agents elsewhere play: taken at a door, played through it, ended with a reward."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from integrations.test_agent import configured, count, printed, roles
from support.forked_python import python
from support.scripted_policies import play, record

from marin_rl.config import Config
from marin_rl.errors import ConfigError, InputError
from marin_rl.integrations.agent_sessions import outcome_of, private_folder, serve_sessions
from marin_rl.storage.runs import Run
from marin_rl.types import Rollout

QUESTION = [{"role": "user", "content": "what is it"}]


def sessions_folder(place: Path) -> Path:
    """A folder beside `place`, whose own name may be too long for a socket below it."""
    return Path(tempfile.mkdtemp(prefix="s", dir=place.parent))


def offered(place: Path, **options: Any) -> Config:
    return configured(place, "", command=None, sessions=str(sessions_folder(place)), **options)


@contextmanager
def door(config: Config, variables: dict[str, str] | None = None) -> Iterator[str]:
    """A process of `marin-rl sessions`; its address. Killed at the end: it keeps nothing."""
    Run.create_or_open(config)
    command = [python(), "-m", "marin_rl", "sessions", config.run_id, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--json", "--root", str(config.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | (variables or {}),
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = process.stdout.readline()
        assert ready, process.stderr.read()
        yield json.loads(ready)["url"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def take(url: str, **headers: str) -> dict[str, Any]:
    """A session, as soon as there is one."""
    while (answer := httpx.post(f"{url}/sessions", headers=headers)).status_code == 503:
        assert answer.headers["retry-after"] == "1"
        time.sleep(0.05)
    assert answer.status_code == 201, answer.text
    return answer.json()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(session: dict[str, Any], messages: Any, key: str | None = None, **fields: Any) -> Any:
    return httpx.post(
        f"{session['base_url']}/chat/completions",
        json={"messages": messages, **fields},
        headers=bearer(key or session["key"]),
        timeout=60,
    )


def end(session: dict[str, Any], key: str | None = None, **outcome: Any) -> httpx.Response:
    headers = bearer(key or session["reward_key"])
    return httpx.post(session["reward_url"], json=outcome, headers=headers)


def played(config: Config, url: str, agents: Sequence[Callable[[dict[str, Any]], None]]):
    """The rollouts of a group, each played by the next of the agents; and what these raised."""
    failed = list[BaseException]()

    def plays(agent: Callable[[dict[str, Any]], None]) -> None:
        try:
            agent(take(url))
        except BaseException as error:  # noqa: BLE001 - raised below, in the test
            failed.append(error)

    threads = [threading.Thread(target=plays, args=(agent,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    _, (group,) = record(config, count)
    for thread in threads:
        thread.join(60)
    for error in failed:
        raise error
    return group.rollouts


def test_agents_elsewhere_play_the_members_of_a_group(tmp_path: Path) -> None:
    seen = list[dict[str, Any]]()

    def talks(session: dict[str, Any]) -> None:
        seen.append(session)
        first = [{"role": "user", "content": session["task"]["prompt"]}]
        answer = ask(session, first).json()["choices"][0]["message"]
        with httpx.stream(
            "POST",
            f"{session['base_url']}/chat/completions",
            json={"messages": [*first, answer, *QUESTION], "stream": True},
            headers={"x-api-key": session["key"]},
        ) as stream:
            assert stream.status_code == 200
            assert [*stream.iter_lines()][-2] == "data: [DONE]"
        assert end(session, output="12345").json() == {"ended": True}
        assert end(session, reward=2.0).status_code == 409
        assert ask(session, first).status_code == 409

    def is_rewarded(session: dict[str, Any]) -> None:
        ask(session, QUESTION)
        end(session, reward={"tests": 0.5, "style": 0.25})

    config = offered(tmp_path)
    with door(config) as url:
        rollouts = played(config, url, [talks, is_rewarded])
    by_reward = {rollout.reward: rollout for rollout in rollouts}
    assert set(by_reward) == {5.0, 0.75}
    assert roles(by_reward[5.0]) == ["user", "assistant"] * 2
    assert printed(by_reward[5.0])["output"].content == "[output]\n12345"
    assert by_reward[5.0].segment_lengths is None
    assert {part.name: part.value for part in by_reward[0.75].turns[-1].rewards} == {
        "tests": 0.5,
        "style": 0.25,
    }
    assert "secret" not in json.dumps(seen)
    assert not list(Path(config.environment.options["sessions"]).iterdir())
    # no key is anywhere in the run
    keys = [session[name] for session in seen for name in ("key", "reward_key")]
    for path in filter(Path.is_file, (tmp_path / "runs").rglob("*")):
        assert not any(key.encode() in path.read_bytes() for key in keys)


def test_a_key_opens_its_own_session_alone_and_never_the_reward(tmp_path: Path) -> None:
    taken = list[dict[str, Any]]()
    both = threading.Barrier(2)

    def attacks(session: dict[str, Any]) -> None:
        taken.append(session)
        both.wait(60)
        (other,) = [each for each in taken if each is not session]
        first = QUESTION
        assert ask(other, first, key=session["key"]).status_code == 401
        assert ask(session, first, key=session["reward_key"]).status_code == 401
        for key in (session["key"], other["key"], other["reward_key"], "none"):
            assert end(session, key=key, reward=100.0).status_code == 401
        door = session["root_url"]
        assert httpx.post(f"{door}/take").status_code == 409
        assert httpx.post(f"{door}/../../take").status_code in (404, 405)
        assert httpx.get(f"{door[: -len(session['id'])]}..%2f..%2fx/v1/models").status_code == 409
        huge = (b"x" * (1 << 20) for _ in range(1024))
        try:
            refused = httpx.post(
                f"{session['base_url']}/chat/completions",
                content=huge,
                headers=bearer(session["key"]),
            )
            assert refused.status_code == 413
        except httpx.TransportError:
            pass  # the connection was closed on it
        wrong: list[Any] = [{}, {"reward": "much"}, {"reward": 1e40}, {"reward": {}}]
        for outcome in wrong:
            assert end(session, **outcome).status_code == 400
        assert ask(session, first).status_code == 200
        both.wait(60)
        assert end(session, reward=1.0).status_code == 200

    config = offered(tmp_path)
    with door(config) as url:
        rollouts = played(config, url, [attacks, attacks])
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]


def test_a_harness_that_fails_or_never_comes_costs_its_rollout(tmp_path: Path) -> None:
    def fails(session: dict[str, Any]) -> None:
        ask(session, QUESTION)
        end(session, error="the machine was lost")

    config = offered(tmp_path, take_timeout_s=6.0, settings={"step_timeout_s": 3.0})
    with door(config) as url:
        rollouts = played(config, url, [fails])
    errors = sorted(str(rollout.error) for rollout in rollouts)
    assert errors[0] == "RewardFault: its harness reports: the machine was lost"
    assert "no agent took the session for 6 s" in errors[1]


@pytest.mark.slow
def test_a_door_may_be_killed_and_started_again_in_between(tmp_path: Path) -> None:
    config = offered(tmp_path)

    sessions = list[tuple[dict[str, Any], Any]]()
    rollouts = list[Rollout]()
    playing = threading.Thread(target=lambda: rollouts.extend(play(config, count)[0].rollouts))
    playing.start()
    with door(config) as url:
        for _ in range(2):
            session = take(url)
            answer = ask(session, QUESTION).json()["choices"][0]["message"]
            sessions.append((session, answer))
    with door(config) as url:
        for session, answer in sessions:
            root = f"{url}/sessions/{session['id']}"
            moved = session | {"base_url": f"{root}/v1", "reward_url": f"{root}/reward"}
            assert ask(moved, [*QUESTION, answer, *QUESTION]).status_code == 200
            end(moved, reward=1.0)
        playing.join(60)
    assert [len(rollout.turns) for rollout in rollouts] == [4, 4]
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]


def test_a_door_with_a_token_hands_out_nothing_without_it(tmp_path: Path) -> None:
    config = offered(tmp_path)
    variable = config.inference.api_key_variable
    with door(config, {variable: "of-the-harness"}) as url:
        assert httpx.post(f"{url}/sessions").status_code == 401
        assert httpx.post(f"{url}/sessions", headers=bearer("of-the-harness")).status_code == 503
        assert httpx.get(f"{url}/sessions/0000/v1/models").status_code == 409


def test_a_folder_of_others_and_a_run_with_a_program_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="expected a folder that only this user may read"):
        private_folder(str(tmp_path / "open"))
    with pytest.raises(ConfigError, match="a path of at most 80 bytes, found"):
        private_folder(str(tmp_path / ("long" * 20)))
    config = configured(tmp_path, "")
    with pytest.raises(InputError, match="expected a folder, found null"):
        serve_sessions(config.environment.options, config.inference, ("127.0.0.1", 0), print)
    with pytest.raises(ConfigError, match="expected one of command"):
        play(configured(tmp_path, "", sessions=str(tmp_path / "s")), count)


@pytest.mark.parametrize("body", [None, [], {"output": 3}, {"reward": None}])
def test_another_end_is_refused(body: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|reward"):
        outcome_of(body)


MAIN = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def test_the_harness_of_the_documentation_plays_a_group(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/agents.md").read_text()
    _, _, code = page.partition("```python\n")
    (tmp_path / "harness.py").write_text(code.partition("```")[0])
    (tmp_path / "main.py").write_text(MAIN)
    config = offered(tmp_path)
    with door(config) as url:
        harness = subprocess.Popen([sys.executable, "harness.py", url], cwd=tmp_path)
        try:
            (group,) = play(config, count)
        finally:
            harness.kill()
            harness.wait()
    assert [rollout.reward for rollout in group.rollouts] == [len("turn 1 of 0")] * 2
