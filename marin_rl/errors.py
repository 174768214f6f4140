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
    │   └── StageFailed          a stage failed on another machine, for good
    ├── OutOfMemory            a program needs more memory than there is
    └── TrainingError
        └── NonFiniteUpdate    loss or gradients were not finite too often in a row

Errors marked (passes) may go away by themselves: `transient` is True on them, and only those are
retried. All survive pickling, because they carry nothing but their message.
"""

INTERRUPTED = 130  # exit code that shells report of a process that Ctrl-C ended


class MarinRLError(Exception):
    """Base of all; `transient` is True where trying again can help."""

    transient: bool = False


class ConfigError(MarinRLError, ValueError):
    """The configuration is wrong: names the key, what was expected, and the value given."""


class InputError(MarinRLError, ValueError):
    """A file or function that the user supplies cannot be used as it is."""


class TemplateRefusal(InputError):
    """A chat template refuses messages, or cannot work with them."""


class TemplateFault(InputError):
    """A chat template is at fault: it exceeds a limit, or does what the sandbox refuses."""


class BridgeFault(InputError):
    """A chat template cannot continue a dialogue from the exact ids of its turns."""


class StorageError(MarinRLError):
    """Something is wrong with what lies, or should lie, under the root."""


class ObjectMissing(StorageError):
    """A key that was expected to exist does not."""


class RootUnfit(StorageError):
    """The root cannot carry a run: not writable, or create-if-absent is not exclusive there."""


class CommitConflict(StorageError):
    """The slot is committed already, with content of another fingerprint."""


class CommitUnknown(StorageError):
    """The store did not tell, until the deadline, whether our create took effect."""

    transient = True


class CommitExpired(StorageError):
    """The attempt began so long ago that gc may have taken what it wrote; a new one can commit."""

    transient = True


class StoreUnavailable(StorageError):
    """The store answered 5xx, timed out or broke the connection."""

    transient = True


class CorruptObject(StorageError):
    """The bytes that were read do not match the digest, magic or schema on record."""


class NewerSchema(StorageError):
    """The object was written under a schema version this software does not know yet."""


class RunLocked(StorageError):
    """Another process on this machine holds the run."""


class RewardFault(MarinRLError):
    """A reward function raised, ran out of time, died, or gave something that is no number."""


class Abstained(RewardFault):
    """No reward function applies to a completion: it has no reward, which is no failure."""


class EnvironmentTimeout(RewardFault):
    """A start or step of an episode took longer than `environment.step_timeout_s`."""


class ToolFault(RewardFault):
    """A tool of an episode failed for good: raised by environments, it ends the episode."""


class InferenceError(MarinRLError):
    """Something went wrong between us and an inference endpoint."""


class EndpointUnavailable(InferenceError):
    """The endpoint refused the connection, timed out, or answered 429 or 5xx."""

    transient = True


class RequestRejected(InferenceError):
    """The endpoint refuses the request itself (4xx); asking again would not help."""


class NoSuchRoute(RequestRejected):
    """The endpoint answered 404: it does not have the route, or what the request names."""


class BadResponse(InferenceError):
    """The endpoint's answer lacks what training needs, or contradicts itself."""


class FleetEmpty(InferenceError):
    """No endpoint served the round's policy for `inference.fleet_timeout_s`."""


class StalePolicy(InferenceError):
    """The endpoint does not serve the parameters that this round must be sampled with."""


class WorkError(MarinRLError):
    """A stage that runs on another machine did not end well there."""


class WorkerLost(WorkError):
    """A node ended, or was lost, before it had committed what it was to commit."""

    transient = True


class ServerUnavailable(WorkError):
    """The Prefect server, which gives out work, is overloaded or does not answer."""

    transient = True


class StageFailed(WorkError):
    """A stage failed on another machine, and trying again would not help."""


class OutOfMemory(MarinRLError):
    """A program needs more memory than the device or the process may have; so will the next try."""


class TrainingError(MarinRLError):
    """The optimisation itself cannot go on."""


class NonFiniteUpdate(TrainingError):
    """The update was not finite more often in a row than the configuration allows."""
