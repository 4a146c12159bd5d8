"""Casts a model's activations, each tensor once, by a scale that is its own or that was made beforehand. Torch only."""

from torch import Tensor

from fp8dash.choose.casts import Cast
from fp8dash.quant.calibrate import StaticScale
from fp8dash.quant.cast import Quantized, codes_by, codes_of, round_trip, rounded


class ActivationCast:
    """Casts each tensor once: q, k and v read the same input, and so do gate and up.

    The last tensor is recognised by identity and version, so that one changed in place is cast anew.
    """

    def __init__(self, cast: Cast, scale: StaticScale | None = None) -> None:
        """A caster that has seen nothing yet; without a scale, each tensor's own is taken."""
        self.cast = cast
        self.scale = scale
        self._seen: tuple[Tensor, int] | None = None
        self._emulated: Tensor | None = None
        self._native: Quantized | None = None
        self._given: Tensor | None = None

    def emulated(self, x: Tensor) -> Tensor:
        """x [..., features] cast and decoded, in its own dtype and shape."""
        self._look_at(x)
        if self._emulated is None:
            flat = x.reshape(-1, x.shape[-1])
            values = round_trip(flat, self.cast) if self._given is None else rounded(flat, self._given, self.cast)
            self._emulated = values.view(x.shape)
        return self._emulated

    def native(self, x: Tensor) -> Quantized:
        """Codes [tokens, features] and scales of x [..., features]; NaN where x is not finite."""
        self._look_at(x)
        if self._native is None:
            flat = x.reshape(-1, x.shape[-1])
            self._native = (
                codes_of(flat, self.cast) if self._given is None else codes_by(flat, self._given, None, self.cast)
            )
        return self._native

    def _look_at(self, x: Tensor) -> None:
        if self._seen is None or self._seen[0] is not x or self._seen[1] != x._version:
            self._seen, self._emulated, self._native = (x, x._version), None, None
            self._given = self.scale.of(x.reshape(-1, x.shape[-1])) if self.scale else None
