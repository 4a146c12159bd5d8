"""Everything that can go wrong and that a person can act on.

    Fp8dashError
    ├── InvalidChoice        a format, recipe or request that cannot be
    ├── ModelError           a model that cannot be found, trusted or read
    ├── CorpusError          a text that cannot be found or is too short
    ├── KernelRefused        a native kernel that will not take these shapes or scales
    ├── NotFinite            NaN or infinity where a number was needed
    ├── PlaceError           a folder of this installation that cannot be made or written to
    ├── StoreError           the database cannot be opened, read or written
    └── QueueError           a job that cannot be submitted, cancelled or retried

A message says what was asked, why it cannot be, and what can be done. Any other exception is a defect: it is
logged with its traceback and shown as an internal error.
"""


class Fp8dashError(Exception):
    """The root: its text is fit for the screen."""


class InvalidChoice(Fp8dashError):
    """A format, tile, recipe or request that cannot be."""


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
