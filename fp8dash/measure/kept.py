"""Bytes kept on disk between runs: written whole or not at all, verified when read. Knows nothing of what they mean."""

import hashlib
import os
import tempfile
from pathlib import Path

DIGEST = hashlib.sha256().digest_size


def keep(payload: bytes, file: Path) -> None:
    """Writes a file beside its place and renames it, so that no reader sees a part of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".kept-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(hashlib.sha256(payload).digest() + payload)
        os.replace(name, file)
    finally:
        Path(name).unlink(missing_ok=True)


def kept(file: Path) -> bytes | None:
    """What was kept, or None where there is nothing or its bytes are not what was written."""
    try:
        data = file.read_bytes()
        os.utime(file)  # the least recently used go first
    except OSError:
        return None
    digest, payload = data[:DIGEST], data[DIGEST:]
    return payload if digest == hashlib.sha256(payload).digest() else None


def name_of(*facts: object) -> str:
    """A file's name for everything that affects its bytes."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
