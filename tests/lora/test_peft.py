"""PEFT folders: written and read to equal arrays, and refused by name where they are unfit."""

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.adapters import DOWN, OUTPUT, QUERY, SHAPES, random_adapter

from marin_rl.config import LoraConfig
from marin_rl.errors import InputError
from marin_rl.lora.adapter import LoraModule, merged
from marin_rl.lora.peft import read_peft, write_peft

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    """Change keys of adapter_config.json."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Change the tensors of adapter_model.safetensors in place."""
    file = str(folder / "adapter_model.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter of rank 4 for every linear layer."""
    write_peft(tmp_path / "a", random_adapter(LoraConfig(rank=4)))
    return tmp_path / "a"


@pytest.mark.parametrize(
    "spec",
    [
        LoraConfig(rank=4, alpha=8.0),
        LoraConfig(rank=3, alpha=0.5, rslora=True, modules=("q_proj", "mlp.*")),
        LoraConfig(rank=4, ranks={"o_proj": 2}, alphas={"mlp.down_proj": 5.0}),
    ],
)
def test_a_written_folder_reads_back_to_equal_arrays(spec: LoraConfig, tmp_path: Path) -> None:
    adapter = random_adapter(spec)
    write_peft(tmp_path / "adapter", adapter, base="a model")
    again = read_peft(tmp_path / "adapter", SHAPES)
    assert again.modules == adapter.modules
    assert again.digest == adapter.digest


def test_keys_shapes_and_settings_are_those_of_peft(tmp_path: Path) -> None:
    adapter = random_adapter(LoraConfig(rank=4, alpha=8.0))
    write_peft(tmp_path / "adapter", adapter, base="a model")
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 7
    assert tensors[f"{Q0}.lora_A.weight"].shape == (4, 24)
    assert tensors[f"{Q0}.lora_B.weight"].shape == (24, 4)
    assert np.array_equal(
        tensors[f"{Q0}.lora_B.weight"], adapter.arrays[f"{QUERY}:B"][0].reshape(24, 4)
    )
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert config["base_model_name_or_path"] == "a model"
    assert isinstance(config["lora_alpha"], int)


def test_half_precision_is_read_as_float32(folder: Path) -> None:
    def half(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({name: array.astype(np.float16) for name, array in tensors.items()})

    change_tensors(folder, half)
    adapter = read_peft(folder, SHAPES)
    assert {array.dtype for array in adapter.arrays.values()} == {np.dtype(np.float32)}


def test_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    write_peft(tmp_path / "a", random_adapter(LoraConfig(rank=1, modules=("down_proj",))))
    values = {f"base_model.model.model.layers.{i}.mlp.down_proj.lora_{s}.weight": n
              for i in range(2) for s, n in (("A", 10), ("B", 24))}  # fmt: skip
    header, data = {}, b""
    for name, count in values.items():
        words = (np.arange(count, dtype=np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
        shape = [1, 10] if count == 10 else [24, 1]
        header[name] = {"dtype": "BF16", "shape": shape,
                        "data_offsets": [len(data), len(data) + len(words)]}  # fmt: skip
        data += words
    text = json.dumps(header).encode()
    (tmp_path / "a/adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + data
    )
    adapter = read_peft(tmp_path / "a", SHAPES)
    assert np.array_equal(adapter.arrays[f"{DOWN}:A"][1, 0], np.arange(10, dtype=np.float32))


def test_ranks_that_differ_by_layer_are_filled_with_zeros(tmp_path: Path) -> None:
    write_peft(tmp_path / "a", random_adapter(LoraConfig(rank=4, alpha=8.0, modules=("o_proj",))))
    name = "base_model.model.model.layers.1.self_attn.o_proj"

    def narrow(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{name}.lora_A.weight"] = tensors[f"{name}.lora_A.weight"][:2].copy()
        tensors[f"{name}.lora_B.weight"] = tensors[f"{name}.lora_B.weight"][:, :2].copy()

    change_tensors(tmp_path / "a", narrow)
    change_config(tmp_path / "a", {"rank_pattern": {"^model.layers.1.self_attn.o_proj$": 2}})
    adapter = read_peft(tmp_path / "a", SHAPES)
    assert adapter.modules[OUTPUT] == LoraModule(rank=4, alpha=8.0)
    tensors = load_file(tmp_path / "a/adapter_model.safetensors")
    base = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    change = merged(base, adapter)[OUTPUT].reshape(2, 24, 24)
    for index, scale in ((0, 8 / 4), (1, 8 / 2)):
        key = f"base_model.model.model.layers.{index}.self_attn.o_proj"
        expected = scale * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
        np.testing.assert_allclose(change[index], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"layers_to_transform": [0]}, "layers_to_transform is"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"invented": 3}, "invented is 3, which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base"),
        ({"peft_type": "LOHA"}, "expected peft_type LORA, found 'LOHA'"),
        ({"r": "8"}, "expected a number for 'r', found '8'"),
        ({"r": True}, "expected a number for 'r', found True"),
        ({"lora_alpha": 10**4000}, "expected at most 1e+06 for 'lora_alpha', found 1000"),
        ({"alpha_pattern": {"q_proj": 1e300}}, "expected at most 1e+06 for 'q_proj', found 1e"),
        ({"r": 0}, "is 0: expected 1 to"),
        ({"r": -1}, "is -1: expected 1 to"),
        ({"r": 5}, r"lora_A of model.layers.0.self_attn.q_proj expected \(5, 24\)"),
        ({"r": 4000}, "is 4000: expected 1 to"),
        ({"lora_alpha": math.inf}, "expected a finite number, found Infinity"),
        ({"use_rslora": "yes"}, "expected use_rslora true or false"),
        ({"rank_pattern": {"(.*)*q": 4}}, "has the pattern '(.*)*q'"),
        ({"rank_pattern": [4]}, "expected rank_pattern to be an object"),
        (
            {"target_modules": ["q_proj", "k_proj"]},
            "target_modules ['q_proj', 'k_proj'] has not model.layers.",
        ),
    ],
)
def test_settings_that_are_not_computed_are_refused(changes, message, folder):
    change_config(folder, changes)
    with pytest.raises(InputError) as error:
        read_peft(folder, SHAPES)
    assert message.replace("\\", "") in str(error.value)


def _foreign(tensors: dict[str, np.ndarray]) -> None:
    tensors["../../etc/passwd"] = np.zeros(3, np.float32)


def _of_the_head(tensors: dict[str, np.ndarray]) -> None:
    tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((4, 24), np.float32)


def _cut(tensors: dict[str, np.ndarray]) -> None:
    del tensors[f"{Q0}.lora_B.weight"]


def _deeper(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q0}.lora_B.weight".replace(".0.", ".7.")] = np.zeros((24, 4), np.float32)


def _not_finite(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q0}.lora_B.weight"][3, 1] = np.nan


def _huge(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q0}.lora_A.weight"][1, 2] = 1e38


def _integers(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q0}.lora_B.weight"] = np.zeros((24, 4), np.int32)


def _none(tensors: dict[str, np.ndarray]) -> None:
    tensors.clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_foreign, "tensor '../../etc/passwd' belongs to no linear layer"),
        (_of_the_head, "lm_head.lora_A.weight' belongs to no linear layer"),
        (_cut, "expected lora_A and lora_B of self_attn.q_proj in each of the 2 layers"),
        (_deeper, "expected lora_A and lora_B of self_attn.q_proj in each of the 2 layers"),
        (_not_finite, "q_proj/weight:B of the adapter has values that are not finite"),
        (_huge, "lora_A of self_attn.q_proj has a value of 1e+38: expected finite ones of at most"),
        (_integers, "is I32: expected F32, F16 or BF16"),
        (_none, "holds no tensor"),
    ],
)
def test_tensors_of_another_base_are_refused(change, message, folder):
    change_tensors(folder, change)
    with pytest.raises(InputError) as error:
        read_peft(folder, SHAPES)
    assert message in str(error.value)


def test_the_adapter_of_a_wider_base_is_refused(folder: Path) -> None:
    wider = {name: (*shape[:-1], 2 * shape[-1]) for name, shape in SHAPES.items()}
    with pytest.raises(InputError, match=r"expected \(4, 48\), found \(4, 24\)"):
        read_peft(folder, wider)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x02",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2**24 + 1) + b"{" * 64,
        struct.pack("<Q", 2) + b"{}" + b"surplus",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 70)
        + b'{"x":{"dtype":"F32","shape":[4000000000],"data_offsets":[0,99999999]}}',
    ],
)
def test_a_damaged_file_is_refused(data: bytes, folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=r"adapter_model\.safetensors"):
        read_peft(folder, SHAPES)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    write_peft(tmp_path / "a", random_adapter(LoraConfig(rank=1, modules=("q_proj",))))
    file = tmp_path / "a/adapter_model.safetensors"
    data = file.read_bytes()
    for length in (*range(64), *range(64, len(data), 97)):
        file.write_bytes(data[:length])
        with pytest.raises(InputError):
            read_peft(tmp_path / "a", SHAPES)


def test_a_sparse_file_of_a_terabyte_is_refused_by_its_size(folder: Path) -> None:
    os.truncate(folder / "adapter_model.safetensors", 2**40)
    with pytest.raises(InputError, match=r"expected at most \d+ bytes, found 1099511627776"):
        read_peft(folder, SHAPES)


def test_a_fifo_is_refused_without_waiting(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    with pytest.raises(InputError, match="no adapter at"):
        read_peft(folder, SHAPES)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_lead_to_files_of_the_same_download_alone(tmp_path: Path, name: str) -> None:
    made = random_adapter(LoraConfig(rank=4))
    folder = tmp_path / "models--org--name/snapshots/0a1b"
    write_peft(folder, made)
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir()
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    assert read_peft(folder, SHAPES).digest == made.digest
    (blobs / name).rename(tmp_path / name)
    for target in (tmp_path / name, f"../../../{name}"):
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        with pytest.raises(InputError, match=f"{name} is a link that leads out of"):
            read_peft(folder, SHAPES)
        (blobs / name).unlink(missing_ok=True)
        (blobs / name).symlink_to(tmp_path / name)
        (folder / name).unlink()
        (folder / name).symlink_to(f"../../blobs/{name}")
        with pytest.raises(InputError, match="is a link that leads out of"):
            read_peft(folder, SHAPES)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a folder with adapter_config\.json"):
        read_peft(tmp_path / "absent", SHAPES)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    adapter = random_adapter(LoraConfig(rank=4))
    write_peft(tmp_path / "a", adapter)
    before = (tmp_path / "a/adapter_model.safetensors").read_bytes()
    with pytest.raises(InputError, match="nothing is overwritten"):
        write_peft(tmp_path / "a", random_adapter(LoraConfig(rank=4), seed=1))
    assert (tmp_path / "a/adapter_model.safetensors").read_bytes() == before
