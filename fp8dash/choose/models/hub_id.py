"""How a model of the Hub is named: `org/name`, or `org/name@revision` for a branch, a tag or a commit; with
`:file.gguf`, one file of it. Values only."""

import re
from dataclasses import dataclass

NAME = r"(?P<name>(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*(?<![.-]))"
REVISION = r"(?P<revision>(?!.*\.\.)[A-Za-z0-9_][\w./-]{0,254})"
FILE = r"(?P<file>(?!.*\.\.)[A-Za-z0-9_][\w./-]*\.gguf)"
PARTS = re.compile(f"{NAME}(@{REVISION})?(:{FILE})?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the Hub, and which of its versions; without a revision its main branch."""

    name: str
    revision: str = ""
    file: str = ""  # the one GGUF file that is meant; empty for the whole model

    @property
    def is_pinned(self) -> bool:
        """True for a commit, which nobody can move.

        >>> HubId("org/name", "main").is_pinned, HubId("org/name", "0" * 40).is_pinned
        (False, True)
        """
        return COMMIT.fullmatch(self.revision) is not None


def hub_id(text: str) -> HubId | None:
    """The model that a text names; None where it is no id of the Hub.

    >>> hub_id("org/name"), hub_id("org/name@v1.0")
    (HubId(name='org/name', revision='', file=''), HubId(name='org/name', revision='v1.0', file=''))
    >>> hub_id("org/name:q4/model-Q4_K_M.gguf").file, hub_id("org/name:../a.gguf"), hub_id("org/name:a.bin")
    ('q4/model-Q4_K_M.gguf', None, None)
    >>> hub_id("/org/name"), hub_id("org/name@../x"), hub_id("org/na--me")
    (None, None, None)
    """
    match = PARTS.fullmatch(text)
    return HubId(match["name"], match["revision"] or "", match["file"] or "") if match else None
