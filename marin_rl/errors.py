"""Every error this library raises for the outside world, as one tree.

    MarinRLError
    ├── ConfigError            the configuration is wrong, or would change an existing run
    ├── InputError             a model folder, tokenizer, prompt file or reward function is unfit
    │   ├── TemplateRefusal    a chat template refuses the messages
    │   ├── TemplateFault      a chat template exceeds a limit, or does what it must not
    │   └── BridgeFault        a chat template cannot continue a dialogue from exact ids
    ├── StorageError
    │   ├── ObjectMissing      a key that was expected is not there
    │   ├── RootUnfit          the root does not honour create-if-absent, or cannot be written
    │   ├── CommitConflict     a slot is committed with another fingerprint
    │   ├── CommitUnknown      the store never said whether our create happened      (passes)
    │   ├── CommitExpired      an attempt so old that gc may have taken its files     (passes)
    │   ├── StoreUnavailable   5xx, timeouts, broken connections                      (passes)
    │   ├── CorruptObject      bytes on disk do not match their digest or schema
    │   ├── NewerSchema        written by a newer version of this software
    │   └── RunLocked          another process on this machine works on the run
    ├── RewardFault            a reward function raised, hung, died, or gave no number
    │   ├── EnvironmentTimeout   a call of an episode took longer than it may
    │   └── ToolFault            a tool of an episode failed for good
    ├── InferenceError
    │   ├── EndpointUnavailable  refused, timed out, 429, 5xx                         (passes)
    │   ├── RequestRejected      the endpoint refuses what was asked
    │   │   └── NoSuchRoute      the endpoint does not know the route, or what it names
    │   ├── BadResponse          the endpoint answered something we cannot train on
    │   ├── FleetEmpty           no endpoint served the round's policy for too long
    │   └── StalePolicy          the endpoint serves other weights than the round's
    ├── WorkError
    │   ├── WorkerLost           a node ended before it had committed its shards       (passes)
    │   ├── ServerUnavailable    the Prefect server gives out no work: 5xx, timeouts   (passes)
    │   ├── ProcessLost          another process of the run failed, or is gone
    │   └── StageFailed          a stage failed on another machine, for good
    ├── OutOfMemory            a program needs more memory than there is
    ├── DeviceUnfit            driver, card or another process keep JAX from computing on a GPU
    ├── DeviceLost             a card failed while a program ran on it
    └── TrainingError
        └── NonFiniteUpdate    loss or gradients were not finite too often in a row

Errors marked (passes) may go away by themselves: `transient` is True on them, and only those are
retried. All survive pickling, because they carry nothing but their message.
"""

INTERRUPTED = 130  # exit code that shells report of a process that Ctrl-C ended
QUIET = "marin_rl_quiet"  # -X of Python: leave out what all processes say before they meet


class MarinRLError(Exception):
    """Base of all; `transient` is True where trying again can help."""

    transient: bool = False


class ConfigError(MarinRLError, ValueError): ...


class InputError(MarinRLError, ValueError): ...


class TemplateRefusal(InputError): ...


class TemplateFault(InputError): ...


class BridgeFault(InputError): ...


class StorageError(MarinRLError): ...


class ObjectMissing(StorageError): ...


class RootUnfit(StorageError): ...


class CommitConflict(StorageError): ...


class CommitUnknown(StorageError):
    transient = True


class CommitExpired(StorageError):
    transient = True


class StoreUnavailable(StorageError):
    transient = True


class CorruptObject(StorageError): ...


class NewerSchema(StorageError): ...


class RunLocked(StorageError): ...


class RewardFault(MarinRLError): ...


class Abstained(RewardFault):
    """No reward function applies to a completion: it has no reward, which is no failure."""


class EnvironmentTimeout(RewardFault): ...


class ToolFault(RewardFault): ...


class InferenceError(MarinRLError): ...


class EndpointUnavailable(InferenceError):
    transient = True


class RequestRejected(InferenceError): ...


class NoSuchRoute(RequestRejected): ...


class BadResponse(InferenceError): ...


class FleetEmpty(InferenceError): ...


class StalePolicy(InferenceError): ...


class WorkError(MarinRLError): ...


class WorkerLost(WorkError):
    transient = True


class ServerUnavailable(WorkError):
    transient = True


class ProcessLost(WorkError): ...


class StageFailed(WorkError): ...


class OutOfMemory(MarinRLError): ...


class DeviceUnfit(MarinRLError): ...


class DeviceLost(MarinRLError): ...


class TrainingError(MarinRLError): ...


class NonFiniteUpdate(TrainingError): ...
