"""From logits to tokens and confidences: argmax, temperature, top-p, with a seed per request.

Random numbers are a hash of (seed, position, round), not a stream: what one request draws depends neither on the
batch it runs in nor on the library, and nothing is drawn at temperature 0.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from herald_pipeline.decoding.arrays import Array, array_namespace, column, device
from herald_pipeline.errors import check_number, raise_problems

_WORD = 0xFFFFFFFF


class Choice(NamedTuple):
    """What a sampler says about each position: ``token`` int64, ``confidence`` and ``entropy`` (nats) float."""

    token: Array
    confidence: Array
    entropy: Array | None


def _multiply(word: Any, factor: int) -> Any:
    # 32 x 32 bit product modulo 2^32 in two parts, so that no intermediate leaves int64.
    high = (word * (factor >> 16)) & 0xFFFF
    return (word * (factor & 0xFFFF) + (high << 16)) & _WORD


def _mix(word: Any) -> Any:
    """A 32-bit word's avalanche: xor-shift and multiply, three rounds (constants of Wellons' triple32)."""
    word = word ^ (word >> 17)
    word = _multiply(word, 0xED5AD4BB)
    word = word ^ (word >> 11)
    word = _multiply(word, 0xAC4C1B51)
    word = word ^ (word >> 15)
    word = _multiply(word, 0x31848BAB)
    return word ^ (word >> 14)


def hash_uniform(key: Array, *more: Any) -> Array:
    """Uniform numbers in [0, 1) as float64, one for each entry of ``key`` (int64); ``more`` broadcasts against it."""
    xp = array_namespace(key)
    word = _mix(key & _WORD)
    for part in more:
        # Both halves count, so that seeds above 2^32 differ.
        word = _mix((word + _mix(part & _WORD) + _multiply((part >> 32) & _WORD, 0x9E3779B1)) & _WORD)
    return xp.astype(word, xp.float64) / 2.0**32


@dataclass(frozen=True, slots=True)
class Sampler:
    """Chooses one token a position.

    Parameters
    ----------
    temperature
        0 is the argmax; nothing is drawn then.
    top_p
        Keeps the smallest set of most probable tokens whose probabilities sum to at least ``top_p``.
    mask_token_id
        Never chosen (a committed MASK would look like an open position); its probability stays in the softmax, so a
        position that would rather stay masked has low confidence.

    Notes
    -----
    Confidence is the chosen token's probability under the plain softmax, without temperature or top-p (LLaDA,
    Fast-dLLM, sglang), in the logits' precision; float64 logits give Fast-dLLM's float64 softmax.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.temperature, "temperature", minimum=0),
                check_number(self.top_p, "top_p", above=0, maximum=1),
            ]
        )

    def __call__(
        self,
        logits: Array,
        *,
        seed: Any = 0,
        position: Any = 0,
        step: Any = 0,
        with_entropy: bool = False,
    ) -> Choice:
        """Choose from ``logits [..., V]``.

        ``seed``, ``position`` and ``step`` (round) are numbers or int64 arrays that broadcast against ``[...]``; beside
        ``[rows, L, V]``, a ``[rows]`` seed or step stands for one value a row.
        """
        xp = array_namespace(logits)
        probability, entropy = _softmax(logits, with_entropy)
        allowed = logits
        if self.mask_token_id is not None:
            token_id = xp.arange(logits.shape[-1], device=device(logits))
            allowed = xp.where(token_id == self.mask_token_id, -float("inf"), logits)
        if self.temperature == 0:
            token = xp.argmax(allowed, axis=-1)
        else:
            zero = xp.zeros_like(logits[..., 0], dtype=xp.int64)
            uniform = hash_uniform(zero + position, zero + _by_row(seed, zero), zero + _by_row(step, zero))
            token = self._draw(allowed, uniform)
        confidence = xp.take_along_axis(probability, token[..., None], axis=-1)[..., 0]
        return Choice(xp.astype(token, xp.int64), confidence, entropy)

    def _draw(self, logits: Array, uniform: Array) -> Array:
        """Inverse of the cumulative distribution over tokens in falling order, cut at ``top_p``."""
        xp = array_namespace(logits)
        probability, _ = _softmax(xp.astype(logits, xp.float64) / self.temperature, False)
        order = xp.argsort(-probability, axis=-1, stable=True)
        falling = xp.take_along_axis(probability, order, axis=-1)
        total = xp.cumulative_sum(falling, axis=-1)
        kept = xp.where(total - falling < self.top_p, falling, 0.0)
        total = xp.cumulative_sum(kept, axis=-1)
        mark = uniform[..., None] * total[..., -1:]
        place = xp.sum(xp.astype(total <= mark, xp.int64), axis=-1)
        # Rounding may put the mark on the total itself: the last kept token then.
        last = xp.sum(xp.astype(kept > 0, xp.int64), axis=-1) - 1
        place = xp.where(place > last, last, place)
        return xp.take_along_axis(order, place[..., None], axis=-1)[..., 0]


def _by_row(value: Any, like: Array) -> Any:
    return column(value) if like.ndim > 1 else value


def _softmax(logits: Array, with_entropy: bool) -> tuple[Array, Array | None]:
    xp = array_namespace(logits)
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    weight = xp.exp(shifted)
    total = xp.sum(weight, axis=-1, keepdims=True)
    probability = weight / total
    if not with_entropy:
        return probability, None
    # H = log Z - sum p x: finite also where p is 0, unlike -sum p log p. A logit of -inf has no part in it.
    share = probability * xp.where(probability > 0, shifted, 0.0)
    return probability, xp.log(total[..., 0]) - xp.sum(share, axis=-1)
