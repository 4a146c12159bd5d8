"""Every error that a person can act on.

    Fp8dashError
    ├── InvalidChoice        an invalid format, recipe or request
    ├── ModelError           a model that cannot be found, trusted or read
    ├── CorpusError          a text that cannot be found or is too short
    ├── KernelRefused        a native kernel that does not take these shapes or scales
    ├── NotFinite            NaN or infinity where a number was needed
    ├── PlaceError           a folder of this installation that cannot be made or written to
    ├── StoreError           the database cannot be opened, read or written
    └── QueueError           a job that cannot be submitted, cancelled or retried

A message says what was asked, why it fails, and what to do. Any other exception is a defect: it is
logged with its traceback and shown as an internal error.
"""


class Fp8dashError(Exception):
    """The root: its text is fit to be shown."""


class InvalidChoice(Fp8dashError):
    """An invalid format, tile, recipe or request."""


class ModelError(Fp8dashError):
    """A model that cannot be found, trusted or read."""


class CorpusError(Fp8dashError):
    """A corpus that cannot be found, decoded or is too short."""


class KernelRefused(Fp8dashError):
    """A native kernel that does not take these shapes or scales."""


class NotFinite(Fp8dashError):
    """NaN or infinity where a number was needed."""


class PlaceError(Fp8dashError):
    """A folder of this installation that cannot be made or written to."""


class StoreError(Fp8dashError):
    """The database cannot be opened, read or written."""


class QueueError(Fp8dashError):
    """A job that cannot be submitted, cancelled or retried."""
