"""A small llama-like transformer in numpy: a target for tests, written to be read.

It is a reference: one row and one layer at a time, and in float64 inside, so that passes of
different widths agree and a difference between two decodings is a bug and not a rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from portadraft.backends.numpy.ops import NumpyOps
from portadraft.core.admission import (
    check_commit,
    check_export,
    check_known,
    check_packed,
    check_prompts,
    check_row,
    check_truncate,
)
from portadraft.core.target import Known, RowState, TargetFacts
from portadraft.core.types import PackedBeam, Verdict, Verified
from portadraft.errors import InvalidArgument

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class NumpyConfig:
    """Sizes of the transformer. `heads` is a multiple of `kv_heads`; `head_size` is even."""

    vocabulary_size: int = 64
    hidden_size: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    inner_size: int = 64
    context_limit: int | None = None
    tied: bool = False
    rope_base: float = 10000.0
    epsilon: float = 1e-6


@dataclass
class _Row:
    """One row's cache: keys and values (layers, kv_heads, capacity, head_size), `length` of them valid."""

    keys: Array
    values: Array
    length: int = 0

    def append(self, keys: Array, values: Array) -> None:
        """Write (layers, kv_heads, n, head_size) behind the context, growing by doubling."""
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            capacity = max(end, 2 * self.keys.shape[2])
            self.keys = _widen(self.keys, capacity)
            self.values = _widen(self.values, capacity)
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end


class NumpyTarget:
    """`Target` over a transformer with RMSNorm, rotary positions, grouped queries and a SiLU MLP.

    weights: by the names of `random`; all float32. chunk: tokens of one prefill pass.
    """

    def __init__(self, config: NumpyConfig, weights: Mapping[str, Array], chunk: int = 64) -> None:
        self.ops = NumpyOps()
        self.config = config
        self._weights = dict(weights)
        self._wide = {name: value.astype(np.float64) for name, value in weights.items()}
        self._chunk = chunk
        self._rows: list[_Row] = []
        self._pending: list[tuple[Array, Array]] | None = None
        self._owner = object()  # tells this target's exported states
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(name.encode() + weights[name].tobytes())
        self.facts = TargetFacts(
            vocabulary_size=config.vocabulary_size,
            hidden_size=config.hidden_size,
            context_limit=config.context_limit,
            dtype="float32",
            cache_bytes_per_token=2 * config.layers * config.kv_heads * config.head_size * 8,
            architecture_id=hashlib.sha256(repr(config).encode()).hexdigest()[:16],
            weights_id=digest.hexdigest()[:16],
        )

    @classmethod
    def random(
        cls,
        seed: int = 0,
        *,
        vocabulary_size: int = 64,
        hidden_size: int = 32,
        layers: int = 2,
        context_limit: int | None = None,
        tied: bool = False,
        chunk: int = 64,
    ) -> NumpyTarget:
        """Random weights, large enough that attention decides what comes out."""
        config = NumpyConfig(
            vocabulary_size=vocabulary_size,
            hidden_size=hidden_size,
            layers=layers,
            inner_size=2 * hidden_size,
            context_limit=context_limit,
            tied=tied,
        )
        generator = np.random.default_rng(seed)

        def matrix(rows: int, columns: int, gain: float) -> Array:
            values = generator.standard_normal((rows, columns)) * gain / math.sqrt(columns)
            return values.astype(np.float32)

        def norm() -> Array:
            return (1 + 0.2 * generator.standard_normal(hidden_size)).astype(np.float32)

        queries, pairs = config.heads * config.head_size, config.kv_heads * config.head_size
        weights = {
            "embeddings": matrix(vocabulary_size, hidden_size, math.sqrt(hidden_size)),
            "norm": norm(),
        }
        if not tied:
            weights["head"] = matrix(vocabulary_size, hidden_size, 3.0)
        for i in range(layers):
            weights |= {
                f"{i}.norm": norm(),
                f"{i}.query": matrix(queries, hidden_size, 1.7),
                f"{i}.key": matrix(pairs, hidden_size, 1.7),
                f"{i}.value": matrix(pairs, hidden_size, 1.5),
                f"{i}.out": matrix(hidden_size, queries, 1.5),
                f"{i}.mlp_norm": norm(),
                f"{i}.gate": matrix(config.inner_size, hidden_size, 1.5),
                f"{i}.up": matrix(config.inner_size, hidden_size, 1.0),
                f"{i}.down": matrix(hidden_size, config.inner_size, 1.0),
            }
        return cls(config, weights, chunk)

    # Target

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(row.length for row in self._rows)

    def room(self, row: int) -> int:
        """How deep a tree below the root may be at this row's length."""
        limit = self.config.context_limit
        return 2**31 - 1 if limit is None else limit - 1 - self._rows[row].length

    def admit(
        self, prompts: Sequence[Sequence[int]], reserve: int = 0, known: Sequence[Known] | None = None
    ) -> Verified:
        limit = self.config.context_limit
        check_prompts(prompts, self.config.vocabulary_size)
        states = check_known(prompts, known, self._owner)
        for i, prompt in enumerate(prompts):
            if limit is not None and len(prompt) > limit:
                raise InvalidArgument(f"prompts[{i}]: {len(prompt)} tokens; expected at most {limit}")
        rows, logits, hidden = [], [], []
        for prompt, entry in zip(prompts, states, strict=True):
            capacity = len(prompt) + reserve
            row = self._empty_row(capacity if limit is None else min(capacity, limit))
            if entry is not None:
                keys, values = entry[0].native
                row.append(keys[:, :, : entry[1]], values[:, :, : entry[1]])
            tokens = np.asarray(prompt[row.length :], dtype=np.int32)
            last = np.zeros((0, self.config.hidden_size))
            for start in range(0, len(tokens), self._chunk):
                part = tokens[start : start + self._chunk]
                causal = np.tril(np.ones((len(part), len(part)), dtype=bool))
                last, keys, values = self._forward(row, part, np.arange(len(part)), causal)
                row.append(keys, values)
            rows.append(row)
            hidden.append(last[-1:])
            logits.append(last[-1:] @ self._head().T)
        self._rows.extend(rows)
        self._pending = None
        return _verified(logits, hidden)

    def export(self, row: int, ids: Sequence[int]) -> RowState:
        check_export(row, ids, self.lengths)
        have = self._rows[row]
        keys, values = have.keys[:, :, : have.length].copy(), have.values[:, :, : have.length].copy()
        return RowState(tuple(ids), (keys, values), keys.nbytes + values.nbytes, self._owner)

    def verify(self, packed: PackedBeam) -> Verified:
        check_packed(packed, self.lengths)
        for i in range(len(self._rows)):
            if packed.length > self.room(i):
                raise InvalidArgument(f"packed: length {packed.length}, but row {i} has room for {self.room(i)}")
        logits, hidden, pending = [], [], []
        for i, row in enumerate(self._rows):
            states, keys, values = self._forward(row, packed.tokens[i], packed.depths[i], packed.mask[i])
            pending.append((keys, values))
            hidden.append(states)
            logits.append(states @ self._head().T)
        self._pending = pending
        return _verified(logits, hidden)

    def commit(self, verdict: Verdict, counts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        check_commit(counts, slots, None if self._pending is None else len(self._pending))
        assert self._pending is not None
        for row, (keys, values), count, path in zip(self._rows, self._pending, counts, slots, strict=True):
            accepted = list(path[:count])
            row.append(keys[:, :, accepted], values[:, :, accepted])
        self._pending = None

    def truncate(self, row: int, length: int) -> None:
        check_truncate(row, length, self.lengths)
        self._rows[row].length = length
        self._pending = None

    def release(self, row: int) -> None:
        check_row(row, self.lengths)
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last
        self._pending = None

    def embeddings(self) -> Array:
        return self._weights["embeddings"]

    def head_rows(self) -> Array:
        return self._weights["embeddings" if self.config.tied else "head"]

    def head_bias(self) -> Array | None:
        return None

    # the transformer

    def _empty_row(self, capacity: int) -> _Row:
        c = self.config
        shape = (c.layers, c.kv_heads, max(1, capacity), c.head_size)
        return _Row(np.zeros(shape), np.zeros(shape))

    def _head(self) -> Array:
        return self._wide["embeddings" if self.config.tied else "head"]

    def _forward(self, row: _Row, tokens: Array, depths: Array, mask: Array) -> tuple[Array, Array, Array]:
        """One row's slots through all layers.

        tokens, depths: (N,); mask: (N, N), among the slots; every slot sees the whole context.
        Returns the states after the final norm (N, D), and the slots' keys and values
        (layers, kv_heads, N, head_size). The cache is read only.
        """
        c, w = self.config, self._wide
        slots, context = len(tokens), row.length
        sees = np.concatenate([np.ones((slots, context), dtype=bool), mask], axis=1)
        positions = context + depths
        x = w["embeddings"][tokens]
        all_keys, all_values = [], []
        for i in range(c.layers):
            y = _rms_norm(x, w[f"{i}.norm"], c.epsilon)
            query = _rotate(_split(y @ w[f"{i}.query"].T, c.heads), positions, c.rope_base)
            keys = _rotate(_split(y @ w[f"{i}.key"].T, c.kv_heads), positions, c.rope_base)
            values = _split(y @ w[f"{i}.value"].T, c.kv_heads)
            all_keys.append(keys)
            all_values.append(values)
            k = np.concatenate([row.keys[i, :, :context], keys], axis=1)
            v = np.concatenate([row.values[i, :, :context], values], axis=1)
            group = c.heads // c.kv_heads  # query heads that share one key head
            scores = query @ np.repeat(k, group, axis=0).transpose(0, 2, 1) / math.sqrt(c.head_size)
            scores = np.where(sees[None], scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            mixed = weights @ np.repeat(v, group, axis=0)  # (heads, N, head_size)
            x = x + mixed.transpose(1, 0, 2).reshape(slots, -1) @ w[f"{i}.out"].T
            y = _rms_norm(x, w[f"{i}.mlp_norm"], c.epsilon)
            gate = y @ w[f"{i}.gate"].T
            gate = gate / (1 + np.exp(-np.clip(gate, -500, 500)))
            x = x + (gate * (y @ w[f"{i}.up"].T)) @ w[f"{i}.down"].T
        return _rms_norm(x, w["norm"], c.epsilon), np.stack(all_keys), np.stack(all_values)


def _verified(logits: Sequence[Array], hidden: Sequence[Array]) -> Verified:
    return Verified(np.stack(logits).astype(np.float32), np.stack(hidden).astype(np.float32))


def _widen(x: Array, capacity: int) -> Array:
    out = np.zeros((*x.shape[:2], capacity, x.shape[3]), dtype=x.dtype)
    out[:, :, : x.shape[2]] = x
    return out


def _split(x: Array, heads: int) -> Array:
    """(N, heads · size) as (heads, N, size)."""
    return x.reshape(x.shape[0], heads, -1).transpose(1, 0, 2)


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight)


def _rotate(x: Array, positions: Array, base: float) -> Array:
    """Rotary positions: the pair (j, j + size/2) turns by position · base^(-2j/size)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
