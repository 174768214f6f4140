"""GPUs that cannot be used, or fail: one error each, from JAX's own words."""

import pickle
from types import SimpleNamespace

import jax
import pytest

from marin_rl import devices
from marin_rl.config import load_config
from marin_rl.devices import check_dtype, explained, start_devices
from marin_rl.doctor.engines import accelerator
from marin_rl.errors import DeviceLost, DeviceUnfit
from marin_rl.machine import device_lost, memory_errors

# As JAX and its plugin say it, and CUDA's names of errors in such sentences.
OLD = [
    "Unable to initialize backend 'cuda': INTERNAL: CUDA error: : CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
    ": system has unsupported display driver / cuda driver combination",
    "Unable to initialize backend 'cuda': Found cuSOLVER version 11002, but JAX was built against "
    "version 11401, which is newer. The copy of cuSOLVER that is installed must be at least as new "
    "as the version against which JAX was built.",
    "Backend 'cuda' failed to initialize: Unable to use CUDA because of the following issues with "
    "CUDA components:\nOutdated cuDNN installation found.\nVersion JAX was built against: 8907\n"
    "Minimum supported: 9100\nInstalled version: 8907\nThe local installation version must be no "
    "lower than 9100..",
    "CUDA backend failed to initialize: Found CUDA version 12010, but JAX was built against "
    "version 12020, which is newer.",
]
TAKEN = [
    "Unable to initialize backend 'cuda': INTERNAL: CUDA error: : CUDA_ERROR_DEVICE_UNAVAILABLE: "
    "CUDA-capable device(s) is/are busy or unavailable",
    "Unable to initialize backend 'cuda': INTERNAL: failed call to cuDevicePrimaryCtxRetain: "
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "Unable to initialize backend 'cuda': NOT_FOUND: no supported devices found for platform CUDA.",
]
LOST = {
    "INTERNAL: Failed to retrieve branch_index value on stream 0x5583cca477e0: CUDA error: Could "
    "not synchronize CUDA stream: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was "
    "encountered": "CUDA_ERROR_ILLEGAL_ADDRESS",
    "INTERNAL: Failed to launch CUDA kernel: fusion_12: CUDA_ERROR_ECC_UNCORRECTABLE: "
    "uncorrectable ECC error encountered": "CUDA_ERROR_ECC_UNCORRECTABLE",
    "INTERNAL: CUDA error: Failed to query event: CUDA_ERROR_UNKNOWN: unknown error": (
        "CUDA_ERROR_UNKNOWN"
    ),
}


@pytest.mark.parametrize("said", OLD)
def test_a_driver_that_is_too_old_is_to_be_updated(said: str) -> None:
    error = explained(said)
    assert " ".join(said.split())[:60] in error
    assert "update the driver" in error


@pytest.mark.parametrize("said", TAKEN)
def test_a_card_that_another_process_holds_is_to_be_freed(said: str) -> None:
    assert "end it, or choose another card by CUDA_VISIBLE_DEVICES" in explained(said)


def test_of_a_cudnn_that_does_not_start_both_causes_are_named() -> None:
    error = explained("FAILED_PRECONDITION: DNN library initialization failed.")
    assert "older than JAX's plugin needs, or another process has the card's memory" in error


def test_an_unknown_cause_is_told_as_jax_says_it() -> None:
    error = explained("Unable to initialize backend 'cuda': INTERNAL: something new")
    assert "something new" in error
    assert "nvidia-smi" in error
    assert error.endswith("JAX_PLATFORMS=cpu computes on the CPU")


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which JAX should find a GPU: its files and its plugin are there."""
    monkeypatch.setattr(devices, "computes_on_host", lambda: False)
    monkeypatch.setattr(devices, "PLUGINS", ("xla_cuda12",))
    monkeypatch.setattr(devices, "find_spec", lambda name: name)


@pytest.mark.usefixtures("with_a_gpu")
def test_a_gpu_that_jax_leaves_for_the_cpu_is_an_error_and_not_a_slow_run() -> None:
    assert jax.default_backend() == "cpu"
    with pytest.raises(DeviceUnfit, match=r"went on with the CPU.*update the driver"):
        start_devices("float32")


@pytest.mark.parametrize("said", [OLD[0], TAKEN[0]])
def test_a_backend_that_does_not_start_is_our_error(monkeypatch, said):
    def fails() -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(jax, "devices", fails)
    with pytest.raises(DeviceUnfit) as caught:
        start_devices("float32")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def card(capability: str) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability=capability)


def test_a_card_without_bfloat16_is_refused_where_the_policy_computes_in_it() -> None:
    with pytest.raises(DeviceUnfit, match=r"8\.0 or later, found Tesla T4 of 7\.5.*float32"):
        check_dtype(card("7.5"), "bfloat16")
    check_dtype(card("7.5"), "float32")
    check_dtype(card("10.0"), "bfloat16")
    check_dtype(jax.devices()[0], "bfloat16")


def test_a_machine_without_a_gpu_computes_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert accelerator(load_config("configs/debug.yaml")) == "none: computes on the CPU"


@pytest.mark.parametrize("said", LOST)
def test_a_card_that_fails_under_a_program_is_one_error(said: str) -> None:
    error = jax.errors.JaxRuntimeError(said)
    lost = pytest.raises(DeviceLost, match="continues from its last checkpoint")
    with lost as caught, memory_errors("the training step", ()):
        raise error
    assert f"in the training step ({LOST[said]})" in str(caught.value)
    assert caught.value.__cause__ is error


def test_memory_that_ends_on_a_card_is_no_lost_card() -> None:
    said = "RESOURCE_EXHAUSTED: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
    assert device_lost("a step", RuntimeError(said)) is None
    assert device_lost("a step", ValueError("CUDA_ERROR_UNKNOWN")) is None
