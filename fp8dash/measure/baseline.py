"""The unquantized model's outputs, kept on disk: last hidden states, from which its head gives the exact logits again.

Stored log-probabilities of 16 bits would put a floor of about 5e-4 nats under every KLD; hidden states are exact and a
hundredth of the size. One file per (model, corpus, tokens and scores, torch and device): safetensors, written window
by window beside its place and renamed, its SHA-256 checked whenever it is opened, made anew when damaged. Two workers
that want the same one measure it once. The least recently used go when all exceed LIMIT. Hidden states are read from
the file as they are needed: only what is a few bytes a token stays in memory.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from fp8dash.choose.casts import KvCast
from fp8dash.choose.records import Progress
from fp8dash.errors import ModelError, NotFinite
from fp8dash.measure.corpora import Windows
from fp8dash.measure.divergence import TOP, Comparer, Predictions, predictions_by
from fp8dash.measure.kept import name_of
from fp8dash.model.float32 import in_float32
from fp8dash.model.head import body_of
from fp8dash.quant.kv_cache import quantized_cache

FORMAT = "hidden states with peaks, sums, the five likeliest and the float32 floor, v2"
LIMIT = 8 << 30  # bytes of all baselines on disk; the one in hand stays, however large
STALE_SECONDS = 24 * 3600  # after which a file that was never finished has no writer left
BLOCK = 1 << 20  # bytes read at a time
PAUSE_SECONDS = 0.5
KINDS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}

NO_FLOOR = "no noise floor in window %d: %s"
log = logging.getLogger(__name__)


class OpenFile:
    """A file's descriptor, closed with the last reference to it."""

    def __init__(self, file: Path) -> None:
        """Opens a file to read; raises OSError."""
        self.descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, begin: int, end: int) -> bytearray:
        """The bytes from `begin` up to `end`; raises OSError where the file ends before."""
        data = bytearray()
        while len(data) < end - begin:
            block = os.pread(self.descriptor, end - begin - len(data), begin + len(data))
            if not block:
                raise OSError("the file is shorter than its head says")
            data += block
        return data


@dataclass(frozen=True, slots=True)
class Baseline:
    """A verified baseline: the predictions for all scored tokens, and the file that holds their hidden states."""

    predictions: Predictions  # [scored tokens] each
    floor: Tensor  # float64 [windows]: each one's mean KLD of the same weights in float32; NaN where they do not run
    bounds: tuple[int, ...]  # where each window's scored tokens begin, and where the last one's end
    file: "OpenFile"  # so that a baseline which is evicted meanwhile can still be read
    start: int  # of the hidden states in it
    dtype: torch.dtype
    width: int

    def window(self, index: int, device: torch.device) -> tuple[Tensor, Predictions]:
        """A window's hidden states [scored, width] and the predictions for its tokens, on a device."""
        begin, end = self.bounds[index : index + 2]
        row = self.width * self.dtype.itemsize
        data = self.file.read(self.start + begin * row, self.start + end * row)
        hidden = torch.frombuffer(data, dtype=self.dtype).view(-1, self.width)
        columns = (getattr(self.predictions, field.name) for field in fields(Predictions))
        return hidden.to(device), Predictions(*(column[begin:end].to(device) for column in columns))


def baseline_of(model: Any, head: nn.Module, windows: Windows, file: Path) -> Iterator[Progress | Baseline]:
    """Progress, then the baseline: read from `file`, or measured and kept there. Raises NotFinite or ModelError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.with_suffix(".lock")
    with lock.open("wb") as held:
        while not _taken(held):
            yield Progress("baseline", 0, len(windows), "another run is measuring the same baseline")
            time.sleep(PAUSE_SECONDS)
        baseline = read_baseline(file)
        if baseline is None:
            yield from _measured(model, head, windows, file)
            baseline = read_baseline(file)
        lock.unlink(missing_ok=True)
    yield _kept(baseline, file)


def baseline_file(folder: Path, *, model_hash: str, corpus_hash: str, windows: Windows, device: str) -> Path:
    """Where a baseline is kept: one name for everything that affects its bits."""
    name = name_of(
        FORMAT, model_hash, corpus_hash, windows.content_hash, device, torch.__version__, torch.get_num_threads()
    )
    return folder / "baselines" / f"{name}.safetensors"


@torch.no_grad()
def hidden_states(model: Any, ids: Tensor, kv: KvCast | None = None) -> Tensor:
    """Last hidden states [L - 1, hidden] of one window of token ids [1, L]; the last has no token to predict.

    With `kv` every token reads the keys and values of the earlier ones, and its own, from a quantized cache.
    """
    ids = ids.to(model.device)
    path = {"use_cache": True, "cache": quantized_cache(model, kv)} if kv else {"use_cache": False}
    states: Tensor = body_of(model)(input_ids=ids, **path).last_hidden_state
    return states[0, :-1]


def read_baseline(file: Path) -> Baseline | None:
    """A kept baseline, or None where there is none or its bytes are not what was written. Marks it as used."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        baseline = _read(OpenFile(file))
        os.utime(file)
        return baseline
    return None


def _taken(held: BinaryIO) -> bool:
    """Takes the lock if it is free; True on success. The kernel releases it when the process ends, however it ends."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _kept(baseline: Baseline | None, file: Path) -> Baseline:
    """The baseline that was read back, older ones evicted for it; raises ModelError where there is none."""
    if baseline is None:
        raise ModelError(f"The baseline in {file.parent} cannot be read back: check the disk and its free space.")
    _evict(file)
    return baseline


def _measured(model: Any, head: nn.Module, windows: Windows, file: Path) -> Iterator[Progress]:
    """Measures all windows into the file, whole or not at all."""
    with Writing(head, windows, file) as writing:
        for index, ids in enumerate(windows.ids):
            yield Progress("baseline", 2 * index, 2 * len(windows), f"window {index + 1} of {len(windows)}")
            writing.states(index, hidden_states(model, ids[None]))
            yield Progress("baseline", 2 * index + 1, 2 * len(windows), f"window {index + 1}, once more in float32")
            writing.widened(index, _in_float32(model, ids[None], index))


class Writing:
    """A baseline as it is measured, window by window, into a file beside its place: whole or not at all."""

    def __init__(self, head: nn.Module, windows: Windows, file: Path) -> None:
        """Takes the head, and where the baseline goes once all windows were given."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._head, self._windows, self._comparer = file, head, windows, _floor_comparer(head)
        self._beside = contextlib.ExitStack()  # drops a file that is never closed
        self._stream = self._beside.enter_context(_beside(file))
        self._parts: list[Predictions] = []
        self._hidden: dict[int, Tensor] = {}  # of windows that are not yet given in float32 too
        self._floor: list[float] = []

    def __enter__(self) -> "Writing":
        return self

    def states(self, index: int, hidden: Tensor) -> None:
        """The next window's last hidden states [L - 1, hidden]; raises NotFinite."""
        hidden = hidden[self._windows.rows(index)]
        targets = self._windows.targets(index).to(hidden.device)
        self._parts.append(_checked_predictions(self._head, hidden, targets, index))
        if index == 0:
            self._stream.write(_header(self._windows, hidden))
        self._stream.write(_bytes(hidden))
        self._hidden[index] = hidden

    def widened(self, index: int, hidden: Tensor | None) -> None:
        """The same window's, of the same weights in float32; None where the model does not run in it."""
        base_hidden = self._hidden.pop(index)
        if hidden is None:
            self._floor.append(float("nan"))
            return
        targets = self._windows.targets(index).to(hidden.device)
        widened = hidden[self._windows.rows(index)]
        try:
            scores = self._comparer.compare(widened, base_hidden, self._parts[index], targets)
            self._floor.append(float(scores.kld.mean()))
        except RuntimeError as error:  # its body gives another dtype than its head reads
            log.warning(NO_FLOOR, index + 1, str(error).splitlines()[0])
            self._floor.append(float("nan"))

    def close(self) -> None:
        """Puts the file in its place: all windows were given. Those not given in float32 have no noise floor."""
        for index in list(self._hidden):
            self.widened(index, None)
        for field in fields(Predictions):
            self._stream.write(_bytes(torch.cat([getattr(part, field.name) for part in self._parts])))
        self._stream.write(_bytes(torch.tensor(self._floor, dtype=torch.float64)))
        self._beside.close()

    def read_back(self) -> Baseline:
        """Closes, and reads what was written; raises ModelError."""
        self.close()
        return _kept(read_baseline(self._file), self._file)

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.close()
        else:
            self._beside.__exit__(*error)


def _checked_predictions(head: nn.Module, hidden: Tensor, targets: Tensor, index: int) -> Predictions:
    predictions = predictions_by(head, hidden, targets)
    if not bool(torch.isfinite(predictions.nll).all()):
        raise NotFinite(
            f"The unquantized model gives NaN or infinity in window {index + 1}: it overflows in bfloat16, or is "
            "damaged. Try another model, or download it again."
        )
    return predictions


def _floor_comparer(head: nn.Module) -> Comparer:
    """Compares the head in float32 with the head as it is."""

    def widened(hidden: Tensor) -> Tensor:
        with in_float32(head):
            logits: Tensor = head(hidden)
            return logits

    return Comparer(widened, head)


def _in_float32(model: Any, ids: Tensor, index: int) -> Tensor | None:
    """A window's last hidden states of the same weights in float32; None where the model does not run in it."""
    try:
        with in_float32(model):
            return hidden_states(model, ids)
    except RuntimeError as error:  # layers that insist on a dtype, or too little memory: no reason to fail a run
        log.warning(NO_FLOOR, index + 1, str(error).splitlines()[0])
        return None


@contextlib.contextmanager
def _beside(file: Path) -> Iterator[BinaryIO]:
    """A new file that takes `file`'s place, signed, once it is whole."""
    handle, name = tempfile.mkstemp(prefix=".baseline-", dir=file.parent)
    try:
        with os.fdopen(handle, "w+b") as stream:
            yield stream
            _sign(stream)
        os.replace(name, file)
    finally:
        Path(name).unlink(missing_ok=True)


def _header(windows: Windows, hidden: Tensor) -> bytes:
    """The head of a safetensors file for these windows, its digest still blank."""
    tokens, end = windows.bounds[-1], 0
    kinds = {dtype: kind for kind, dtype in KINDS.items()}
    shapes = {
        "hidden": (kinds[hidden.dtype], [tokens, hidden.shape[1]]),
        "nll": ("F64", [tokens]),
        "peak": ("F32", [tokens]),
        "total": ("F32", [tokens]),
        "likeliest": ("I64", [tokens]),
        "top": ("I64", [tokens, TOP]),
        "floor": ("F64", [len(windows)]),
    }
    entries: dict[str, Any] = {"__metadata__": {"digest": "0" * 64, "bounds": json.dumps(windows.bounds)}}
    for name, (kind, shape) in shapes.items():
        begin, end = end, end + KINDS[kind].itemsize * torch.Size(shape).numel()
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _sign(stream: BinaryIO) -> None:
    """Writes the digest of all else over its blank."""
    stream.seek(0)
    length = 8 + int.from_bytes(stream.read(8), "little")
    stream.seek(0)
    head, digest = stream.read(length), _digest(stream, length)
    stream.seek(0)
    stream.write(head.replace(b"0" * 64, digest.encode(), 1))
    stream.flush()
    os.fsync(stream.fileno())


def _digest(stream: BinaryIO, start: int) -> str:
    """SHA-256 of what follows the head."""
    stream.seek(start)
    digest = hashlib.sha256()
    while block := stream.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _read(file: OpenFile) -> Baseline:
    """The baseline of an open file; raises ValueError where its bytes are not what was signed."""
    start = 8 + int.from_bytes(file.read(0, 8), "little")
    with os.fdopen(os.dup(file.descriptor), "rb") as stream:
        entries = json.loads(file.read(8, min(start, os.fstat(file.descriptor).st_size)))
        notes, hidden = entries.pop("__metadata__"), entries["hidden"]
        if notes["digest"] != _digest(stream, start):
            raise ValueError("its digest is not what was signed")
    small = {name: _tensor(file, start, entry) for name, entry in entries.items() if name != "hidden"}
    return Baseline(
        predictions=Predictions(*(small[field.name] for field in fields(Predictions))),
        floor=small["floor"],
        bounds=tuple(json.loads(notes["bounds"])),
        file=file,
        start=start + hidden["data_offsets"][0],
        dtype=KINDS[hidden["dtype"]],
        width=hidden["shape"][1],
    )


def _tensor(file: OpenFile, start: int, entry: dict[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    return torch.frombuffer(file.read(start + begin, start + end), dtype=KINDS[entry["dtype"]]).view(entry["shape"])


def _evict(kept: Path) -> None:
    """Removes the least recently used baselines until all fit LIMIT, and what writers that died left behind."""
    now = time.time()
    held: list[tuple[float, int, Path]] = []
    for file in kept.parent.iterdir():
        with contextlib.suppress(OSError):  # another worker was first
            facts = file.stat()
            if file.is_dir():  # needles' answers: a few kilobytes each
                continue
            if not file.name.startswith(".") and file.suffix != ".lock":
                held.append((facts.st_mtime, facts.st_size, file))
            elif now - facts.st_mtime > STALE_SECONDS:
                file.unlink()
    excess = sum(size for _, size, _ in held) - LIMIT
    for _, size, file in sorted(held):
        if excess > 0 and file != kept:
            file.unlink(missing_ok=True)
            excess -= size
