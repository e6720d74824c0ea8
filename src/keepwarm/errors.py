"""Every exception Keepwarm raises on purpose.

    KeepwarmError
    ├── ConfigError            a setting or argument is wrong                        (also ValueError)
    │   └── CannotListen       the service's host or port cannot be taken
    ├── PromptError            a request cannot be run as asked                      (also ValueError)
    │   ├── EmptyPrompt        no token to run
    │   ├── PromptTooLong      prompt and new tokens do not fit the context window, or the memory there is
    │   └── TemplateError      the chat template refused the messages, or does not compile
    ├── ModelError
    │   ├── ModelNotFound      neither a folder, a GGUF file, a hub id that loads, nor "demo"
    │   ├── UnsupportedModel   loads, but its KV cannot be cached safely, or it is not a decoder
    │   └── DownloadError      a download broke off or its bytes are not the expected ones
    ├── Overloaded             a full queue, or no page of KV memory left: ask again later
    ├── TookTooLong            a request was not read, rendered and tokenized in time, or its caller stopped waiting
    └── StoreError
        ├── StoreNotWritable   the folder cannot be written
        ├── StoreTooNew        written by a newer Keepwarm
        ├── StoreUnusable      the catalogue cannot be opened, or lies where it must not
        ├── StoreLocked        encrypted, and the key is missing or wrong
        ├── BundleError        a bundle is damaged, of another model, or not signed as asked
        ├── PurgedMeanwhile    the work to be written began before a purge of its salt: it is not written
        ├── StoreFull          no space within the cap or on the device; requests go on uncached
        ├── RemoteUnavailable  a remote tier did not answer in time; a miss, and requests go on without it
        │   └── RemoteFull     the tier answered that it has no room
        └── CorruptRun         stored bytes are not what was written; always a miss, never an answer
            └── StoreStalled   the folder does not answer in time: a miss

A message names what was expected, what was seen, and the cure.
"""

from __future__ import annotations


class KeepwarmError(Exception):
    """Base of all errors of this package."""


class ConfigError(KeepwarmError, ValueError):
    """A setting or argument is unknown or out of range."""


class CannotListen(ConfigError):
    """The service cannot listen: the host is no address of this machine, or the port is taken.

    The message is what was `seen` and its `cure`. `busy`: something else listens on the port.
    """

    def __init__(self, seen: str, cure: str, *, busy: bool = False) -> None:
        super().__init__(f"{seen}: {cure}")
        self.seen = seen
        self.cure = cure
        self.busy = busy


class PromptError(KeepwarmError, ValueError):
    """A request cannot be run as asked."""


class EmptyPrompt(PromptError):
    """The prompt has no token: there is nothing to compute a next token from."""


class PromptTooLong(PromptError):
    """Prompt plus new tokens exceed the context window, or all the memory there is for KV.

    `length`: tokens of the prompt alone, or more than the window holds; None where only memory is short.
    """

    def __init__(self, message: str, length: int | None = None) -> None:
        super().__init__(message)
        self.length = length


class TemplateError(PromptError):
    """The model's chat template refused the messages or tools, or does not compile."""


class ModelError(KeepwarmError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """The name is neither a model folder, nor a hub id that loads, nor "demo"."""


class UnsupportedModel(ModelError):
    """The model's KV cannot be cached safely, or it is not a decoder-only model."""


class DownloadError(ModelError):
    """A download broke off, or its bytes are not the expected ones."""


class Overloaded(KeepwarmError):
    """The queue is full, or no page of KV memory is left."""


class TookTooLong(KeepwarmError):
    """A request was not read, rendered and tokenized in time, or its caller stopped waiting."""


class StoreError(KeepwarmError):
    """The store cannot do what was asked."""


class StoreNotWritable(StoreError):
    """The store's folder cannot be created or written."""


class StoreTooNew(StoreError):
    """The store was written by a newer Keepwarm."""


class StoreUnusable(StoreError):
    """The catalogue cannot be opened, is damaged, or lies on a network file system."""


class StoreLocked(StoreError):
    """The store is encrypted and the key is missing or wrong, or a key was given for a store without encryption."""


class BundleError(StoreError):
    """A bundle cannot be exported or imported: damaged, of another model, or its signature is missing or wrong."""


class PurgedMeanwhile(StoreError):
    """The work to be written began before a purge of its salt. It is not written; requests are still answered."""


class StoreFull(StoreError):
    """A run does not fit under the byte cap, or the device is full. Requests go on uncached."""


class RemoteUnavailable(StoreError):
    """A remote tier did not answer in time, or answered wrongly. Requests go on without it."""


class RemoteFull(RemoteUnavailable):
    """A remote tier has no room for what is written."""


class CorruptRun(StoreError):
    """A stored run failed verification. The caller treats it as a miss."""


class StoreStalled(CorruptRun):
    """The store's folder does not answer in time. Nothing is wrong with what is stored; requests go on uncached."""
