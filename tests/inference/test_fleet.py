"""Whom a client of a fleet asks next, and what the entries of `inference.endpoints` stand for."""

import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from marin_rl.config import InferenceConfig, parse_config, split_labels
from marin_rl.errors import ConfigError
from marin_rl.inference.client.fleet import Fleet, Load, load_in
from marin_rl.inference.client.fleet_sources import Endpoint, EndpointSource

A, B, C = "http://a/v1", "http://b/v1", "http://c/v1"


def fleet(*endpoints: Endpoint, zone: str | None = None) -> Fleet:
    """A fleet whose members are all ready."""
    made = Fleet(zone)
    made.update(endpoints)
    for member in made.members.values():
        member.state = "ready"
    return made


def asked(made: Fleet, times: int, session: str = "") -> list[str]:
    """URLs that are chosen one after the other; nothing is answered meanwhile."""
    urls: list[str] = []
    for _ in range(times):
        member = made.choose(session, 0.0)
        assert member is not None
        member.sent(1)
        urls.append(member.url)
    return urls


def test_idle_endpoints_take_turns_and_a_busy_one_is_spared() -> None:
    made = fleet(Endpoint(url=A), Endpoint(url=B), Endpoint(url=C))
    assert asked(made, 6) == [A, B, C, A, B, C]
    made.members[A].reported(Load(waiting=50, running=8, slots=64))
    assert A not in asked(made, 20)


def test_reported_load_counts_with_requests_sent_since() -> None:
    made = fleet(Endpoint(url=A), Endpoint(url=B))
    made.members[A].reported(Load(waiting=3, running=1, slots=8))
    made.members[B].reported(Load(waiting=0, running=0, slots=8))
    assert asked(made, 4) == [B] * 4
    assert made.members[B].work == 4
    for _ in range(4):
        made.members[B].answered(1)
    assert made.members[B].work == 0
    made.members[A].reported(Load(waiting=0, running=0, slots=None))
    assert made.members[A].slots == 64


def test_a_plain_list_is_asked_in_turn_and_what_was_tried_last() -> None:
    made = Fleet.of([A, B, C])
    assert asked(made, 4, "a session of its own") == [A, B, C, A]
    for tried, then in (([], B), ([B], C), ([B, C], A), ([A, B, C], B)):
        member = made.choose("", 0.0, tried)
        assert member is not None
        assert member.url == then
    for url, until in ((A, 3.0), (B, 1.0), (C, 2.0)):
        made.members[url].not_before = until
    assert asked(made, 2) == [B, B], "all asked to be left alone: the first whose time ends"


def test_larger_endpoints_get_more() -> None:
    made = fleet(Endpoint(url=A, slots=2), Endpoint(url=B, slots=6))
    assert sorted(asked(made, 8)) == [A] * 2 + [B] * 6


def test_near_endpoints_come_first_and_others_when_they_are_full() -> None:
    near, far = {"zone": "eu"}, {"zone": "us"}
    made = fleet(Endpoint(url=A, labels=far), Endpoint(url=B, labels=near, slots=3), zone="eu")
    assert asked(made, 3) == [B, B, B]
    assert asked(made, 2) == [A, A]
    made.members[B].answered(1)
    assert asked(made, 1) == [B]
    nowhere = fleet(Endpoint(url=A, labels=far), zone="eu")
    assert asked(nowhere, 1) == [A]


def test_a_session_stays_until_its_endpoint_is_gone() -> None:
    made = fleet(Endpoint(url=A), Endpoint(url=B))
    first = asked(made, 1, "group-1")
    assert asked(made, 5, "group-1") == first * 5
    assert made.place_of("group-1") == first[0]
    made.members[first[0]].state = "lost"
    other = asked(made, 1, "group-1")
    assert other != first
    made.members[first[0]].state = "ready"
    assert asked(made, 2, "group-1") == other * 2, "the cache is there now"


def test_one_that_asks_to_be_left_alone_is_and_refused_ones_are_named() -> None:
    made = fleet(Endpoint(url=A), Endpoint(url=B))
    made.members[A].not_before = 10.0
    assert asked(made, 3) == [B] * 3
    made.update([Endpoint(url=B, refused="other code: expected digest 1, found 2")])
    assert made.choose("", 0.0) is None
    assert made.state_lines() == f"{B}: refused, other code: expected digest 1, found 2"
    made.update([])
    assert made.state_lines() == "none is known"


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (
            "marin_rl_samples_queued 7.0\nmarin_rl_slots_busy 3.0\nmarin_rl_slots 16.0\n",
            Load(waiting=7, running=3, slots=16),
        ),
        (
            '# HELP x\nvllm:num_requests_running{engine="0",model_name="p"} 2.0\n'
            'vllm:num_requests_waiting{engine="0",model_name="p"} 1.0\n',
            Load(waiting=1, running=2, slots=None),
        ),
        ('sglang:num_queue_reqs{model_name="p"} 4.0\n', Load(waiting=4, running=0, slots=None)),
        ("<html>", None),
        # a server or a proxy that is broken
        ("marin_rl_samples_queued -\nmarin_rl_slots_busy e\nmarin_rl_slots 1e999\n", None),
        (
            "vllm:num_requests_running -3\nvllm:num_requests_waiting 2.0\n",
            Load(waiting=2, running=0, slots=None),
        ),
        ("", None),
    ],
)
def test_loads_are_read_from_the_metrics_of_each_kind_of_server(text, load):
    assert load_in(text.encode()) == load


def test_entries_are_urls_names_and_files(tmp_path: Path) -> None:
    listed = tmp_path / "fleet.txt"
    listed.write_text("# two of them\nhttp://b/v1 zone=us rack=3\n\nhttp://c/v1/\n")
    source = EndpointSource([f"{A} zone=eu", f"file:{listed}", "dns:http://localhost:8123/v1", B])
    found = {endpoint.url: dict(endpoint.labels) for endpoint in source.resolve()}
    assert found.pop("http://127.0.0.1:8123/v1") == {}
    found.pop("http://[::1]:8123/v1", None)
    assert found == {A: {"zone": "eu"}, B: {"zone": "us", "rack": "3"}, C: {}}
    listed.write_text("http://c/v1\n")
    assert [endpoint.url for endpoint in EndpointSource([f"file:{listed}"]).resolve()] == [C]


def test_a_name_without_an_address_has_no_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    assert EndpointSource(["dns:http://nowhere:8000/v1"]).resolve() == []


@pytest.mark.parametrize(
    ("text", "expected"), [(None, "cannot read"), ("http://b/v1\nftp://c\n", "line 2")]
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str | None, expected: str) -> None:
    listed = tmp_path / "fleet.txt"
    if text is not None:
        listed.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        EndpointSource([f"file:{listed}"]).resolve()


def test_a_single_entry_is_a_list_of_one() -> None:
    config = InferenceConfig.model_validate({"endpoints": "registered", "publish": "pull"})
    assert config.endpoints == ("registered",)
    assert config.pulled
    assert split_labels("http://a/v1 zone=eu") == (A, {"zone": "eu"})
    assert split_labels("file:/a b/fleet.txt") == ("file:/a b/fleet.txt", {})


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("registered", "start servers (marin-rl serve RUN --follow --register)"),
        ("file:/etc/fleet.txt", "put the URL of a server that answers on a line of /etc/fleet.txt"),
        ("dns:http://engines:8000/v1", "start servers behind the name of http://engines:8000/v1"),
        (f"{A} zone=eu", f"start the server at {A}"),
    ],
)
def test_each_kind_of_entry_has_an_advice_of_its_own(entry: str, expected: str) -> None:
    assert EndpointSource([entry]).advice == expected
    both = EndpointSource([entry, C]).advice
    assert both == f"{expected} or start the server at {C}"


def test_an_endpoint_that_reports_no_capacity_is_asked_all_the_same() -> None:
    made = fleet(Endpoint(url=A, slots=0), Endpoint(url=B, slots=4))
    made.members[A].reported(Load(waiting=0, running=0, slots=0))
    assert set(asked(made, 8)) == {A, B}


@pytest.mark.parametrize(
    "key",
    [
        "inference.engine.slots",
        "inference.requests_in_flight_max",
        "inference.fleet_timeout_s",
        "flow.shards_in_flight_max",
    ],
)
def test_no_capacity_is_refused_by_its_key(key: str) -> None:
    section, _, name = key.rpartition(".")
    tree: dict[str, object] = {name: 0}
    for part in reversed(section.split(".")):
        tree = {part: tree}
    with pytest.raises(ConfigError, match=key):
        parse_config(tree)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"endpoints": ["a:8000"]}, "zone=eu after a space"),
        ({"endpoints": ["http://a/v1 zone"]}, "zone=eu after a space"),
        ({"endpoints": ["dns:https://a/v1"]}, "zone=eu after a space"),
        ({"endpoints": "registered"}, "expected pull"),
        (
            {"endpoints": "registered", "publish": "update_weights_from_disk"},
            "update_weights_from_disk, but endpoints has registered",
        ),
        ({"publish": "pull"}, "endpoints is empty"),
        ({"fleet_timeout_s": 0}, "fleet_timeout_s"),
        ({"zone": "a b"}, "zone"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tree, expected):
    with pytest.raises(ValidationError, match=expected):
        InferenceConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, False),
        ({"endpoints": [A, B]}, False),
        ({"endpoints": A, "publish": "update_weights_from_disk"}, False),
        ({"publish": "vllm_reload"}, False),
        ({"endpoints": "file:/a", "route": "sglang"}, False),
        ({"endpoints": A, "publish": "pull"}, True),
        ({"endpoints": A, "publish": "vllm_reload"}, True),
        ({"endpoints": [A, f"{B} zone=eu"]}, True),
        ({"endpoints": "dns:http://a:8000/v1"}, True),
        ({"endpoints": "file:/a"}, True),
    ],
)
def test_endpoints_that_come_and_go_are_a_fleet_and_a_plain_list_is_none(keys, expected):
    assert InferenceConfig.model_validate(keys).has_fleet is expected
