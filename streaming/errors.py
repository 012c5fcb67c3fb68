"""Define every error that this package raises on purpose.

::

    ShardstreamError
    ├── ConfigError             (ValueError)         an argument, or a combination of arguments, that cannot work
    │   ├── OptionError         (TypeError)          an option that does not exist; says which was meant
    │   └── MemoryLimitError                         the plan does not fit into memory_limit
    ├── StateError              (ValueError)         a state_dict that does not belong to this loader
    ├── StorageError            (OSError)            the store could not do what was asked, after retries
    │   ├── NotFoundError       (FileNotFoundError)  no such bucket, object, file or matching pattern
    │   ├── AccessDeniedError   (PermissionError)    no, wrong or insufficient credentials
    │   └── TransferError                            short, stalled or reset transfer; Range ignored; 5xx
    ├── DataError               (ValueError)         bytes that are not what they should be
    │   ├── TarError                                 a damaged or unusable tar member
    │   ├── DuplicateKeyError                        one key twice in a shard, or one field twice in a sample
    │   ├── ChecksumError                            bytes that differ from the index's CRC32C
    │   ├── DecodeError                              a field whose bytes do not decode
    │   ├── IndexFormatError                         a damaged or unknown index file
    │   └── IndexMismatchError                       an index that does not describe the shards as they are
    ├── IndexMissingError       (FileNotFoundError)  needs an index, and there is none
    ├── TooManyBadSamplesError  (RuntimeError)       max_bad_samples was exceeded
    ├── AgreementError          (RuntimeError)       ranks are about to train on different things
    ├── IteratorEndedError      (RuntimeError)       an iterator that was ended before its epoch: closed, or failed
    │   └── IteratorSupersededError                  another iterator, set_epoch or load_state_dict took its place
    ├── ReplicaError            (RuntimeError)       another rank of the same data share is gone, or left its loop
    ├── ForkedError             (RuntimeError)       used in a forked child of the process that it belongs to
    └── WorkerError             (RuntimeError)       an exception of a decode worker that cannot leave it as it is
        └── WorkerDiedError                          a batch on which decode workers die again and again

Each type also derives from the fitting builtin, so that ``except FileNotFoundError`` keeps working. A message says
what went wrong, where (URL, key, byte range), what was got and expected, and what cures it. Errors of other libraries
are translated once, in the adapter that called them, and stay reachable as ``__cause__``.
"""

from __future__ import annotations

import sys

if not hasattr(sys.modules["streaming"], "_HOMES"):
    raise ImportError(
        f"import streaming: {sys.modules['streaming'].__file__} is another package, MosaicML's for example, in the "
        f"place of shardstream's; {__file__} is shardstream's. Both are imported as `streaming`, so they need separate "
        "environments. Cure: `pip uninstall mosaicml-streaming` and `pip install --force-reinstall shardstream`"
    )


class ShardstreamError(Exception):
    """Base of all errors raised on purpose by shardstream."""


class ConfigError(ShardstreamError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class OptionError(ConfigError, TypeError):
    """An option that does not exist; the message says which was meant, or where it is to be given."""


class MemoryLimitError(ConfigError):
    """The plan needs more bytes than ``memory_limit`` allows; the message holds the arithmetic."""


class StateError(ShardstreamError, ValueError):
    """A ``state_dict`` that is malformed or belongs to another data set or order."""


class StorageError(ShardstreamError, OSError):
    """The store could not do what was asked, after retries."""


class NotFoundError(StorageError, FileNotFoundError):
    """No such bucket, object or file, or nothing matches a pattern."""


class AccessDeniedError(StorageError, PermissionError):
    """No, wrong or insufficient credentials."""


class TransferError(StorageError):
    """A transfer that came short, stalled, was reset or answered otherwise than asked. Worth another try."""


class DataError(ShardstreamError, ValueError):
    """Bytes that are not what they should be."""


class TarError(DataError):
    """A damaged, truncated or unusable tar archive or member."""


class DuplicateKeyError(DataError):
    """One key in two places of a shard, or one field twice in a sample."""


class ChecksumError(DataError):
    """Bytes whose CRC32C is not the one in the index."""


class DecodeError(DataError):
    """A field whose bytes do not decode."""


class IndexFormatError(DataError):
    """An index file that is damaged, or of a version that this release does not read."""


class IndexMismatchError(DataError):
    """An index that does not describe the shards as they are: replaced, truncated, missing or extra."""


class IndexMissingError(ShardstreamError, FileNotFoundError):
    """Something that needs an index, asked of shards that have none."""


class TooManyBadSamplesError(ShardstreamError, RuntimeError):
    """More samples were unreadable than ``max_bad_samples`` allows."""


class AgreementError(ShardstreamError, RuntimeError):
    """Ranks differ in data set, order, options or position; the message names them and what differs."""


class IteratorEndedError(ShardstreamError, RuntimeError):
    """An iterator was asked for a batch after its loader was closed, or after an error; its epoch is not over."""


class IteratorSupersededError(IteratorEndedError):
    """An iterator was asked for a batch after another one, ``set_epoch`` or ``load_state_dict`` took its place."""


class ReplicaError(ShardstreamError, RuntimeError):
    """Another rank of the same data share is gone, silent, or left its loop while this one went on."""


class ForkedError(ShardstreamError, RuntimeError):
    """An iterator or a writer used in a forked child of the process that made it, which alone can go on with it."""


class WorkerError(ShardstreamError, RuntimeError):
    """An exception raised in a decode worker, of a type that cannot be sent to the training process."""


class WorkerDiedError(WorkerError):
    """Decode workers died, one after the other, of the same batch; the message names the batch and the signal."""
