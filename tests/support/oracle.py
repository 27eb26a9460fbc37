"""Plain reference formulas of the core, in Python integers.

Nothing here imports the ops. Legend: M ids, D columns, R rows.
"""

from __future__ import annotations

import functools

from torch import Tensor

WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, made odd
MIX_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
EXTREME_IDS = [-(2**63), -(2**63) + 1, -2, -1, 0, 1, 2**63 - 2, 2**63 - 1]


def signed(word: int) -> int:
    """Reads an unsigned 64-bit word as int64."""
    return word - WORD if word >= WORD // 2 else word


def mix64(number: int) -> int:
    """SplitMix64's output function with the constants of Stafford's variant 13, unsigned."""
    x = number % WORD
    x = ((x ^ x >> 30) * MIX_FACTORS[0]) % WORD
    x = ((x ^ x >> 27) * MIX_FACTORS[1]) % WORD
    return x ^ x >> 31


def unmix64(word: int) -> int:
    """Returns the id, as int64, whose mixed id is `word`."""

    def undo_shift(x: int, shift: int) -> int:
        result = x
        for _ in range(64 // shift):
            result = x ^ result >> shift
        return result

    x = undo_shift(word, 31)
    x = undo_shift(x * pow(0x94D049BB133111EB, -1, WORD) % WORD, 27)
    return signed(undo_shift(x * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD, 30))


def shifted(words: Tensor, by: int) -> Tensor:
    """Returns words [M] int64, shifted right as unsigned words."""
    return words >> by & (1 << 64 - by) - 1


def unmixed(mixed: Tensor) -> Tensor:
    """Returns the ids [M] of mixed ids [M] int64, as `unmix64`."""
    x = (mixed ^ shifted(mixed, 31) ^ shifted(mixed, 62)) * signed(0x319642B2D24D8EC3)
    x = (x ^ shifted(x, 27) ^ shifted(x, 54)) * signed(0x96DE1B173F119089)
    return x ^ shifted(x, 30) ^ shifted(x, 60)


@functools.lru_cache(maxsize=1024)
def hash_words(key: int) -> tuple[int, int, int, int]:
    """Returns the word and the three factors of the slots' hash with this key; key 0 has public ones."""
    if key == 0:
        return 0, *MIX_FACTORS, GOLDEN
    flip, *factors = (mix64(key + i * GOLDEN) for i in range(1, 5))
    return flip, *(factor | 1 for factor in factors)


def slot_hash(number: int, key: int = 0) -> int:
    """Returns the word that determines the home slot of an id."""
    flip, first, second, third = hash_words(key)
    x = number % WORD ^ flip
    x = (x ^ x >> 30) * first % WORD
    x = (x ^ x >> 27) * second % WORD
    return (x ^ x >> 31) * third % WORD


def home_slot(number: int, capacity: int, key: int = 0) -> int:
    """Returns the home slot of an id in a map of `capacity` slots: the first slot of a line of four."""
    return (slot_hash(number, key) * capacity >> 64) // 4 * 4


@functools.lru_cache(maxsize=1024)
def _inverse(factor: int) -> int:
    return pow(factor, -1, WORD)


def id_of_hash(word: int, key: int = 0) -> int:
    """Returns the id whose `slot_hash` is `word`."""
    flip, first, second, third = hash_words(key)
    for factor, shift in ((third, 31), (second, 27), (first, 30)):
        word = word * _inverse(factor) % WORD
        word ^= word >> shift ^ word >> 2 * shift
    return signed(word ^ flip)


def ids_at_home(slot: int, capacity: int, count: int) -> list[int]:
    """Returns distinct ids whose home with key 0 is the line of `slot`; their hashes are scaled to `slot`.

    The first id has the least hash that is scaled to `slot`.
    """
    first = -(-slot * WORD // capacity)
    step = max(1, WORD // capacity // (count + 1))
    return [id_of_hash(first + k * step) for k in range(count)]


def probe_lengths(slots: Tensor, key: int = 0) -> list[int]:
    """Returns the probe length of the id in each slot, [C] for `slots` [C, 2]; 0 for an empty slot."""
    capacity = len(slots)
    return [
        1 + (slot - home_slot(number, capacity, key)) % capacity if place else 0
        for slot, (number, place) in enumerate(slots.tolist())
    ]


def canonical_order(ids: list[int]) -> list[int]:
    """Returns the ids in canonical order."""
    return sorted(ids, key=mix64)


def draw_of(key, step, number):
    """Returns an id's draw in [0, 1) at a step: the SplitMix64 word before the words used for rounding."""
    state = mix64(mix64(key + step * GOLDEN) ^ mix64(number))
    return (mix64(state) >> 11) / 2**53


def chance(probability, count):
    """Returns 1 - (1 - p)^count by squaring; every rounding is that of IEEE doubles."""
    refusal, power = 1.0, 1.0 - probability
    for bit in reversed(f"{count:b}"):
        refusal = refusal * power if bit == "1" else refusal
        power = power * power
    return 1.0 - refusal
