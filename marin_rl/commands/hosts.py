"""Training over several processes: how they find one another, and agree before they begin.

`on_all_processes` surrounds what a command of training does in process 0; in the others it makes
the calls of process 0 until that one ends. What processes say to one another meanwhile is in
`marin_rl.processes`; `launch` starts several on one machine.
"""

import ctypes
import hashlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer

from marin_rl.commands.options import err, report
from marin_rl.config import Config, DistributedConfig
from marin_rl.config.files import paths_in
from marin_rl.errors import INTERRUPTED, ConfigError, MarinRLError, ProcessLost
from marin_rl.machine import LOOPBACK, computes_on_host
from marin_rl.processes import AGAIN, POLL_S, Processes, begun, join, joined, own_address

COORDINATOR, PROCESSES = "MARIN_RL_COORDINATOR", "MARIN_RL_PROCESSES"
PROCESS_ID = "MARIN_RL_PROCESS_ID"

# A peer that is silent for so long is dead; without a reason to hurry, processes leave together.
HEARTBEAT_S, SHUTDOWN_S = 45, 10
LEFT_S = 1  # from what others say last to their end, before which JAX would abort them aloud
NAMED_MAX = 5  # differences between two processes that an error names
COMPARED_BYTES = 2**24  # of each file that a configuration names

_leaving = threading.Lock()
_codes = list[int]()  # of this process's end, once it has told of it
_handlers = list[Any]()  # of std::terminate: ours, and the one before


@contextmanager
def on_all_processes(config: Config) -> Iterator[None]:
    """Play the block in process 0, and end the other processes with it; do nothing in a single one.

    In the others this never returns: the process ends as process 0 does. Raises ConfigError where
    the processes do not come together, are not alike, or are to do what several cannot do.
    """
    settings = several(config)
    if settings is None:
        yield
        return
    processes = _joined(settings)
    _share_key(processes, config, settings.timeout_s)
    # In a thread: devices of all start together, and one of another process may be missing.
    begun(lambda: processes.post(f"facts/{processes.number}", _facts(config)))
    if processes.number:
        _follow(processes)
    for sign in (signal.SIGINT, signal.SIGTERM):
        # Prefect raises it again where it met a flow's own code, and the others are to hear of it.
        signal.signal(sign, signal.default_int_handler)
    try:
        _check_alike(processes, settings.timeout_s)
        _refuse(config)
        yield
    except BaseException as error:  # noqa: BLE001 - a thread may wait for a dead process's devices
        _codes.append(code := _code_of(error))
        processes.end(code)
        time.sleep(LEFT_S)
        _leave(code)
    if processes.end(0):
        import jax

        jax.distributed.shutdown()


def several(config: Config) -> DistributedConfig | None:
    """The section, with what the environment says; None for a single process.

    Raises ConfigError where a variable is no number.
    """
    numbers = dict[str, int]()
    for name, variable in (("processes", PROCESSES), ("process_id", PROCESS_ID)):
        if text := os.environ.get(variable):
            if not text.isascii() or not text.isdigit():
                raise ConfigError(f"{variable} is {text!r}: expected a number")
            numbers[name] = int(text)
    section = config.distributed
    if section is None and "processes" not in numbers:
        return None
    known: dict[str, Any] = {} if section is None else section.model_dump()
    if place := os.environ.get(COORDINATOR):
        known["coordinator"] = place
    settings = DistributedConfig(**{**known, **numbers})
    number, count = settings.process_id, settings.processes
    if number is not None and count is not None and number >= count:
        raise ConfigError(
            f"process {number} of {count} processes: expected distributed.process_id "
            f"({PROCESS_ID}) from 0 to {count - 1}"
        )
    return None if count == 1 else settings


def _joined(settings: DistributedConfig) -> Processes:
    """Join the other processes, before anything asks JAX for its devices. Raises ConfigError."""
    place, number = settings.coordinator, settings.process_id
    name = "this process" if number is None else f"process {number}"
    if place is not None and number == 0:
        _check_port(place)
    import jax
    from jax._src import distributed
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue] - it is compiled

    _call_on_bad_cast(_leave_lost)
    jax.config.update("jax_enable_preemption_service", False)  # it complains of a dead process 0
    if computes_on_host():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        _silence_gloo()
    # JAX's own end of this wait is an abort without a word on who is missing.
    came = threading.Event()
    where = f"at {place}" if place else "by the environment"
    count = settings.processes or "all"
    missing = f"{count} processes did not come together {where}"
    if place is not None and number:
        missing = f"process 0 or its coordinator did not come {where}"
    text = (
        f"{name}: {missing} within {settings.timeout_s:g} s (distributed.timeout_s): expected the "
        "same command on every host, with the same distributed.coordinator and "
        "distributed.processes"
    )
    threading.Thread(
        target=_give_up, args=(came, settings.timeout_s, text), name="joining", daemon=True
    ).start()
    # JAX's own function hands on no callback.
    client = _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_client = partial(client, missed_heartbeat_callback=_leave_lost)
    try:
        jax.distributed.initialize(
            place,
            settings.processes,
            number,
            initialization_timeout=int(settings.timeout_s) + 60,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
            # JAX's own is all addresses of the host.
            coordinator_bind_address=place if place and place.startswith(LOOPBACK) else None,
        )
    except (RuntimeError, ValueError) as error:
        text = (
            f"{name} cannot join the others ({error}): give distributed.coordinator, .processes "
            "and .process_id, or start it where JAX detects them"
        )
        _leave(report(ConfigError(text)))
    finally:
        _jax.get_distributed_runtime_client = client
        came.set()
    state = distributed.global_state
    assert state.client is not None, "it has joined"
    address = _address_towards(place or str(state.coordinator_address))
    join(processes := Processes(state.client, state.process_id, state.num_processes, address))
    return processes


def _address_towards(place: str) -> str:
    """The address of this host on its way to HOST:PORT, by which that host reaches it."""
    host, _, port = place.rpartition(":")
    (family, kind, _, _, address), *_ = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def _serves_others(config: Config) -> bool:
    return own_address() not in LOOPBACK and not config.inference.endpoints


def _share_key(processes: Processes, config: Config, timeout_s: float) -> None:
    """Have embedded servers of several hosts ask for one token, where the user has given none."""
    variable = config.inference.api_key_variable
    if not _serves_others(config):
        return
    if processes.number == 0:
        own = secrets.token_urlsafe(32)
        processes.post("key", "" if os.environ.get(variable) else own)
        os.environ.setdefault(variable, own)
    elif not os.environ.get(variable):
        os.environ[variable] = processes.read("key", timeout_s) or ""


def _silence_gloo() -> None:
    """Drop what C++ prints on standard output: gloo does, amid the JSON of a command."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    sys.stdout = own


def _check_port(place: str) -> None:
    host, _, port = place.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"process 0 cannot listen at distributed.coordinator, port {port} of {host}: "
                f"{error}; expected a free port of the host of process 0"
            ) from None


def _give_up(came: threading.Event, timeout_s: float, text: str) -> None:
    if not came.wait(timeout_s):
        _leave(report(ConfigError(text)))


def _follow(processes: Processes) -> NoReturn:
    """Make the calls of process 0, and end as it does."""
    import jax

    from marin_rl.runtime import perform

    code = 1
    try:
        processes.leave_signals_to_first()
        _codes.append(code := processes.follow(perform))
        if code == 0:
            jax.distributed.shutdown()
    except jax.errors.JaxRuntimeError:  # of the store, which process 0 has
        _leave_lost()
    except BaseException as error:  # noqa: BLE001 - it ends this process, and so all
        traceback.print_exception(error)
    _leave(code)


def _facts(config: Config) -> Mapping[str, Any]:
    """Facts that all processes have in common, by name, or an `error` of this one."""
    import jax

    from marin_rl.doctor.engines import OF_EACH
    from marin_rl.storage.provenance import code_digest, library_versions

    try:
        for check in OF_EACH:
            check(config)
        tree = config.model_dump(mode="json", exclude={"distributed"})
        contents = {
            f"content of {key}": _content(path)
            for key, path in paths_in(tree).items()
            if path[:1] == "/"
        }
        own = jax.local_devices()
    except Exception as error:  # noqa: BLE001 - process 0 tells of it
        return {"error": f"{type(error).__name__}: {error}"}
    variable = config.inference.api_key_variable
    token = {f"variable {variable}": "set" if os.environ.get(variable) else "not set"}
    return {
        **(token if _serves_others(config) else {}),
        "code": code_digest(),
        **{f"library {name}": version for name, version in library_versions().items()},
        **dict(_leaves(tree, "")),
        **contents,
        "devices": f"{len(own)} x {own[0].device_kind}",
    }


def _content(path: str) -> str:
    """Digest of sizes and beginnings of a file, those of a pattern, or those in a folder."""
    digest = hashlib.sha256()
    inside = path.lstrip("/")
    for file in sorted({*Path("/").glob(inside), *Path("/").glob(f"{inside}/*")}):
        if file.is_file():
            digest.update(f"{file.name} {file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(COMPARED_BYTES))
    return digest.hexdigest()


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _known_facts(processes: Processes, timeout_s: float) -> dict[int, Mapping[str, Any]]:
    """Facts of all processes by number. Raises ConfigError for the first that fails."""
    until, known = time.monotonic() + timeout_s, dict[int, Mapping[str, Any]]()
    while missing := set(range(processes.count)) - known.keys():
        for number in missing:
            facts = processes.read(f"facts/{number}", POLL_S / 10)
            if facts is None and time.monotonic() > until:
                facts = {"error": "does not answer"}
            if facts is not None:
                known[number] = facts
                if "error" in facts:
                    raise ConfigError(f"process {number}: {facts['error']}")
    return known


def _check_alike(processes: Processes, timeout_s: float) -> None:
    """Raise ConfigError, by number, for a process that is not like process 0."""
    known = _known_facts(processes, timeout_s)
    own = known[0]
    for number, facts in known.items():
        names = [name for name in {**own, **facts} if own.get(name) != facts.get(name)]
        if names:
            shown = "; ".join(
                f"{name} {facts.get(name)!r:.100}, expected {own.get(name)!r:.100}"
                for name in names[:NAMED_MAX]
            )
            raise ConfigError(
                f"process {number} is not like process 0: it has {shown}; expected the same code, "
                "libraries, configuration, data and number of devices in every process"
            )


def _refuse(config: Config) -> None:
    """Raise ConfigError for what does not work over several processes, by its key."""
    refused = {
        "policy.quantize_base": config.policy.quantize_base,
        "asynchrony.max_staleness": config.max_staleness,
        "asynchrony.in_flight_updates": config.in_flight_updates,
    }
    for key, value in refused.items():
        if value:
            raise ConfigError(
                f"{key} is {value!r}, which several processes cannot do: leave it out"
            )


def _code_of(error: BaseException) -> int:
    """The exit code for what ended a command, which is printed."""
    if isinstance(error, MarinRLError | OSError):
        return report(error)
    if isinstance(error, KeyboardInterrupt):
        err.print("interrupted")
        return INTERRUPTED
    if isinstance(error, typer.Exit):
        return error.exit_code
    traceback.print_exception(error)
    return 1


def _call_on_bad_cast(work: Callable[[], None]) -> None:
    """Have a std::bad_cast that nothing catches call `work`, in place of an abort.

    JAX 0.10 raises it where it is to call Python at the loss of another process, with a status of
    C++ for which Python has no type.
    """
    handler_type = ctypes.CFUNCTYPE(None)
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:  # a system with another C++ library, which aborts
        return
    library.__cxa_current_exception_type.restype = ctypes.POINTER(ctypes.c_char_p)
    library._ZSt13set_terminatePFvvE.restype = handler_type

    def terminated() -> None:
        kind = library.__cxa_current_exception_type()  # its second word is the type's name
        work() if kind and kind[1] == b"St8bad_cast" else _handlers[1]()

    _handlers.append(handler_type(terminated))
    _handlers.append(library._ZSt13set_terminatePFvvE(_handlers[0]))


def _leave_lost(*_: Any) -> NoReturn:
    """End at the loss of another process, which several threads may notice."""
    _leaving.acquire()
    known = joined()
    other = f"process {1 - known.number}" if known and known.count == 2 else "another process"
    error = ProcessLost(f"{other} has ended, or is out of reach: {AGAIN}")
    _leave(_codes[0] if _codes else report(error))


def _leave(code: int) -> NoReturn:
    """Exit at once: a thread of this process may wait for another process for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
