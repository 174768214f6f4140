"""Adapters over HTTP: loaded and unloaded by vLLM's and SGLang's routes, and asked for by name."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine_adapters import adapter_for, merged
from support.models import tiny_model
from support.servers import CHAT, ENGINE, chat_body, check_sampled, sampled, serving, talk

from marin_rl.config import ServerConfig
from marin_rl.lora.adapter import Adapter, policy_digest
from marin_rl.lora.peft import write_peft
from marin_rl.serving.server import PolicyServer

ADMIN = {"Authorization": "Bearer of-the-admin"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ROOMY = ENGINE.model_copy(update={"adapters_max": 2, "adapter_rank_max": 8})
BASE = "policy@00003-01234567"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Adapter]]:
    """PEFT folders below one root, and the adapters in them."""
    root, made = tmp_path_factory.mktemp("adapters"), {}
    for seed, name in enumerate(("first", "second", "third")):
        adapter = adapter_for(tiny_model(), seed)
        write_peft(root / name, adapter)
        made[name] = (root / name, adapter)
    return made


@pytest.fixture(scope="module")
def server(adapters: dict[str, tuple[Path, Adapter]]) -> Iterator[PolicyServer]:
    root = adapters["first"][0].parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARIN_RL_ADMIN_KEY", "of-the-admin")
        with serving(ServerConfig(update_roots=(str(root),)), engine=ROOMY) as server:
            yield server


@pytest.fixture(autouse=True)
def nothing_loaded(server: PolicyServer) -> Iterator[None]:
    yield
    for name in server.adapters.names:
        server.adapters.unload(name)


def load(server: PolicyServer, name: str, folder: Path | str, **fields: Any) -> tuple[int, Any]:
    body = {"lora_name": name, "lora_path": str(folder), **fields}
    status, _, answer = talk(server, "POST", LOAD, body, ADMIN)
    return status, answer


def unload(server: PolicyServer, name: str) -> tuple[int, Any]:
    status, _, answer = talk(server, "POST", UNLOAD, {"lora_name": name}, ADMIN)
    return status, answer


def check(answer: dict[str, Any], adapter: Adapter | None) -> None:
    """The tokens were drawn by the base merged with the adapter."""
    check_sampled(answer, tiny_model() if adapter is None else merged(tiny_model(), adapter))


def models(server: PolicyServer) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in talk(server, "GET", "/v1/models")[2]["data"]}


def test_an_adapter_is_a_model(server, adapters):
    folder, adapter = adapters["first"]
    added = "Success: LoRA adapter 'first' added successfully."
    assert load(server, "first", folder) == (200, added)
    answer = sampled(server, "first")
    assert answer["model"] == "first"
    digest = policy_digest("0123456789", adapter.modules, adapter.digest)
    assert answer["parameters_digest"] == digest
    check(answer, adapter)
    # the base is asked for as before, and SGLang's spelling names the adapter behind it
    assert sampled(server, "policy")["model"] == BASE
    check(sampled(server, "policy"), None)
    assert sampled(server, "policy:first")["choices"] == answer["choices"]
    assert sampled(server, f"{BASE}:first")["model"] == "first"
    cards = models(server)
    assert list(cards) == [BASE, "policy", "first"]
    assert (cards["first"]["root"], cards["first"]["parent"]) == ("policy", BASE)
    assert talk(server, "GET", "/v1/models/first")[2] == cards["first"]
    assert unload(server, "first") == (200, "Success: LoRA adapter 'first' removed successfully.")
    status, _, refused = talk(server, "POST", CHAT, chat_body(model="first"))
    assert (status, refused["error"]["code"]) == (404, "model_not_found")
    assert list(models(server)) == [BASE, "policy"]


def test_every_sampling_route_takes_an_adapter(server, adapters):
    folder, adapter = adapters["first"]
    load(server, "policy@00007-abcdef01", folder)
    model = "policy@00007-abcdef01"
    prompt = sampled(server, model)["prompt_token_ids"]
    plain = {"model": model, "prompt": prompt, "max_tokens": 4, "seed": 1, "logprobs": 0}
    body = {"return_token_ids": True, "compact_logprobs": True}
    answer = talk(server, "POST", "/v1/completions", plain | body)[2]
    answer["prompt_token_ids"] = prompt
    check(answer, adapter)
    assert (answer["model"], answer["weight_version"]) == (model, 7)
    ids = {"model": model, "token_ids": prompt, "sampling_params": {"max_tokens": 4, "seed": 1}}
    generated = talk(server, "POST", "/inference/v1/generate", ids)[2]
    assert generated["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    native = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "sampling_seed": 1}}
    named = talk(server, "POST", "/generate", native | {"lora_path": model})[2]
    assert named["output_ids"] == answer["choices"][0]["token_ids"]
    assert named["meta_info"]["weight_version"] == "7"
    base = talk(server, "POST", "/generate", native | {"lora_path": None})[2]
    assert base["meta_info"]["weight_version"] == "3"
    status, _, refused = talk(server, "POST", "/generate", native | {"lora_path": "none"})
    assert (status, refused["error"]["param"]) == (404, "lora_path")
    streamed = talk(server, "POST", CHAT, chat_body(model=model, stream=True))[2]
    assert f'"model":"{model}"' in streamed


def test_sglang_loads_and_unloads_by_its_own_routes(server, adapters):
    body = {"lora_name": "second", "lora_path": str(adapters["second"][0]), "pinned": False}
    status, _, answer = talk(server, "POST", "/load_lora_adapter", body, ADMIN)
    assert (status, answer) == (200, {"success": True, "loaded_adapters": {"second": "second"}})
    check(sampled(server, "second"), adapters["second"][1])
    body = {"lora_name": "second"}
    status, _, answer = talk(server, "POST", "/unload_lora_adapter", body, ADMIN)
    assert (status, answer) == (200, {"success": True, "loaded_adapters": {}})


def test_a_name_is_loaded_once_unless_in_place(server, adapters):
    load(server, "one", adapters["first"][0])
    status, answer = load(server, "one", adapters["second"][0])
    assert status == 400
    assert "has already been loaded" in answer["error"]["message"]
    check(sampled(server, "one"), adapters["first"][1])
    assert load(server, "one", adapters["second"][0], load_inplace=True)[0] == 200
    check(sampled(server, "one"), adapters["second"][1])
    assert load(server, "one", adapters["third"][0], load_inplace=True)[0] == 200
    check(sampled(server, "one"), adapters["third"][1])


def test_beyond_the_room_it_says_how_many_there_are(server, adapters):
    for name in ("first", "second"):
        assert load(server, name, adapters[name][0])[0] == 200
    status, answer = load(server, "third", adapters["third"][0])
    assert status == 400
    message = answer["error"]["message"]
    assert "at most 2 adapters (inference.engine.adapters_max), found 2 loaded" in message
    assert list(models(server)) == [BASE, "policy", "first", "second"]
    assert unload(server, "first")[0] == 200
    assert load(server, "third", adapters["third"][0])[0] == 200
    status, answer = unload(server, "nobody")
    assert (status, answer["error"]) == (
        404,
        {
            "message": "no adapter 'nobody' is loaded; loaded: second, third",
            "type": "invalid_request_error",
            "param": "lora_name",
            "code": "model_not_found",
        },
    )


def test_an_adapter_other_than_promised_is_refused(server, adapters):
    folder, adapter = adapters["first"]
    digest = policy_digest("0123456789", adapter.modules, adapter.digest)
    status, answer = load(server, "wrong", folder, parameters_digest="0" * 64)
    assert (status, answer["error"]["code"]) == (409, "digest_mismatch")
    assert digest in answer["error"]["message"]
    assert load(server, "right", folder, parameters_digest=digest, weight_version="9")[0] == 200
    assert sampled(server, "right")["weight_version"] == 9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("policy", "is a name of the base model"),
        (BASE, "is a name of the base model"),
        ("../up", "cannot name an adapter"),
        ("/etc/passwd", "cannot name an adapter"),
        ("a:b", "cannot name an adapter"),
        ("", "at least 1 character"),
    ],
)
def test_names_that_are_refused(server, adapters, name, message):
    status, answer = load(server, name, adapters["first"][0])
    assert status == 400
    assert message in answer["error"]["message"]
    assert server.adapters.names == []


def broken(folder: Path, kind: str) -> None:
    """Damage the copy of an adapter, or change it as one may who can write below the root."""
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    if kind == "nan":
        file.write_bytes(file.read_bytes()[:-4] + struct.pack("<f", float("nan")))
    elif kind == "missing":
        file.unlink()
    else:
        secret = folder.parents[1] / f"{kind}-secret"
        secret.write_text('{"peft_type": "TOP-SECRET"}')
        linked = config if kind == "link-settings" else file
        linked.unlink()
        linked.symlink_to(secret)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", "not finite"),
        ("missing", "no adapter at"),
        ("link-settings", "adapter_config.json is a link that leads out of"),
        ("link-weights", "adapter_model.safetensors is a link that leads out of"),
    ],
)
def test_damaged_folders_are_refused_and_others_go_on(server, adapters, kind, message):
    root = adapters["first"][0].parent
    write_peft(root / kind, adapters["first"][1])
    broken(root / kind, kind)
    load(server, "second", adapters["second"][0])
    status, answer = load(server, "broken", root / kind)
    assert (status, answer["error"]["code"]) == (400, "adapter_refused")
    assert message in answer["error"]["message"]
    assert "SECRET" not in answer["error"]["message"]
    check(sampled(server, "second"), adapters["second"][1])


def test_adapters_of_another_base_or_rank_are_refused(server, adapters):
    root = adapters["first"][0].parent
    other = tiny_model("llama-tied", heads=8, width=64)
    write_peft(root / "other", adapter_for(other))
    write_peft(root / "large", adapter_for(tiny_model(), rank=9))
    for name, message in (
        ("other", "use the base that the adapter was made for"),
        ("large", "of rank 8 at most (inference.engine.adapter_rank_max)"),
    ):
        status, answer = load(server, name, root / name)
        assert status == 400
        assert message in answer["error"]["message"]


def test_places_outside_the_roots_are_not_read(server, adapters, tmp_path):
    write_peft(tmp_path / "outside", adapters["first"][1])
    (adapters["first"][0].parent / "link").symlink_to(tmp_path / "outside")
    for place in (tmp_path / "outside", adapters["first"][0].parent / "link", "hf-org/adapter"):
        status, answer = load(server, "outside", place)
        assert status == 400
        assert "below a root that this server was started with" in answer["error"]["message"]


def test_metrics_tell_of_adapters(server, adapters):
    load(server, "first", adapters["first"][0])
    load(server, "first", adapters["first"][0])  # refused
    text = talk(server, "GET", "/metrics")[2]
    assert "marin_rl_adapters_loaded 1.0" in text
    assert "marin_rl_adapters_max 2.0" in text
    assert 'marin_rl_adapter_info{adapter="first"} 1.0' in text
    assert "marin_rl_adapter_load_failures_total" in text
    assert talk(server, "GET", "/admin/status", None, ADMIN)[2]["adapters"] == ["first"]
