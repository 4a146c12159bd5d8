"""How runs stand, as values: a row of the leaderboard, which rows are wanted, and what they share. No database."""

import math
from dataclasses import dataclass

from db.rows import State
from fp8dash.choose.recipe import parse_recipe
from fp8dash.errors import InvalidChoice

BASELINE_PRESET = "BF16"  # the preset that casts nothing
MOST_UNCAST = 0.1  # of the blocks' matrix weights: beyond it a row says that the recipe was applied in part


@dataclass(frozen=True, slots=True)
class Standing:
    """A run's row on the leaderboard. A value of None was not measured, and is never ranked."""

    run: str
    model: str
    recipe: str
    preset: str | None
    state: State
    owner: str
    backend: str | None
    device: str | None
    ppl: float | None = None
    ln_ppl_diff: float | None = None
    ln_ppl_diff_low: float | None = None
    ln_ppl_diff_high: float | None = None
    kld: float | None = None
    kld_low: float | None = None
    kld_high: float | None = None
    kld_noise_floor: float | None = None  # of the baseline: its own weights in float32
    top1: float | None = None
    needle: float | None = None
    gemm_speedup: float | None = None
    bits_per_weight: float | None = None
    coverage: float | None = None
    uncast_share: float | None = None  # of the blocks' matrix weights; None where the recipe casts no Linear
    model_bytes: float | None = None
    weight_sqnr_db: float | None = None
    rank: int | None = None  # by KLD within the group and backend; at the noise floor all share the first
    study: str = ""
    corpus: str = ""
    windows: int = 0
    window_length: int = 0
    method: str = ""  # of the quality numbers
    group: str = ""
    model_hash: str = ""  # of the weights that were measured; empty until they were read
    corpus_hash: str = ""
    error: str | None = None
    created: str = ""  # ISO 8601, UTC
    finished: str = ""
    pinned: bool = False
    note: str = ""
    note_by: str = ""
    note_at: str = ""
    device_kind: str | None = None  # "cpu" or "cuda"

    @property
    def name(self) -> str:
        """What people call it."""
        return self.preset or self.recipe

    @property
    def is_baseline(self) -> bool:
        """True for the unquantized run."""
        return self.preset == BASELINE_PRESET

    @property
    def is_partly_cast(self) -> bool:
        """True where more than a tenth of the blocks' matrix weights stayed as they were, and the recipe names none.

        Its KLD is not the recipe's, and it is never ranked.

        >>> made = [Standing("1", "m", text, None, "finished", "a", None, None, uncast_share=0.8) for text in
        ...         ("w=int8/row", "w=int8/row skip=*.down_proj")]
        >>> [row.is_partly_cast for row in made]
        [True, False]
        """
        return self.uncast_share is not None and self.uncast_share > MOST_UNCAST and not leaves_out(self.recipe)

    @property
    def model_content(self) -> str:
        """What was measured: the hash of the weights, or the model's name where they were never read."""
        return self.model_hash or self.model

    @property
    def corpus_content(self) -> str:
        """The hash of the text that was read, or the corpus's name where it was never read."""
        return self.corpus_hash or self.corpus

    @property
    def is_at_floor(self) -> bool:
        """True where the KLD is no more than rounding alone makes: at or under the noise floor, or zero and below."""
        return self.kld is not None and self.kld <= max(self.kld_noise_floor or 0.0, 0.0)

    @property
    def divergence(self) -> float:
        """The KLD as it ranks: zero at the noise floor, infinite where there is none."""
        if self.kld is None or math.isnan(self.kld):
            return math.inf
        return 0.0 if self.is_at_floor else self.kld

    @property
    def is_within_noise(self) -> bool:
        """True where the KLD's interval reaches down to the noise floor: rounding alone may do as much."""
        if self.is_baseline:
            return False
        if self.kld_low is None or self.kld_noise_floor is None:
            return self.is_at_floor
        return self.kld_low <= self.kld_noise_floor


def leaves_out(recipe: str) -> bool:
    """Whether a recipe itself names weights that stay as they are.

    >>> leaves_out("w=int8/row"), leaves_out("w=int8/row w[*.o_proj]=bf16"), leaves_out("kv=e4m3fn/tensor")
    (False, True, True)
    """
    try:
        parsed = parse_recipe(recipe)
    except InvalidChoice:  # written by another version
        return False
    kept = any(override.cast is None for override in parsed.overrides)
    return bool(parsed.skip) or kept or not (parsed.weights or parsed.activations)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows, in which order: each field narrows, and an empty one does not."""

    states: tuple[str, ...] = ()
    ids: tuple[str, ...] | None = None
    groups: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    studies: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    tiles: tuple[str, ...] = ()
    search: str = ""
    pins: tuple[bool, ...] = ()
    sort: str = "kld"
    order: str = "ascending"
    limit: int | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that may be ranked together, of one backend: what they share and how many there are."""

    key: str
    backend: str
    count: int
    newest: str  # ISO 8601, UTC
    model: str
    corpus: str
    windows: int
    window_length: int
    device: str | None
    method: str = ""  # of the quality numbers
    model_hash: str = ""
    corpus_hash: str = ""


@dataclass(frozen=True, slots=True)
class Facets:
    """What the rows of a choice can be narrowed by."""

    formats: tuple[str, ...]
    tiles: tuple[str, ...]
    owners: tuple[str, ...]
    studies: tuple[str, ...]  # the newest
