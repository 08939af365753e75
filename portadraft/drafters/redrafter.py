"""ReDrafter: beam search over the recurrent drafter (paper section 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np

from portadraft.core.beam import beam_search, beam_search_lengths
from portadraft.core.chain import sample_chain
from portadraft.core.drafter import StatelessDrafter
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.rejection import Chain
from portadraft.core.target import Target
from portadraft.core.types import Array, Beam, BeamShape
from portadraft.errors import IncompatibleDrafter, InvalidArgument
from portadraft.identity import make_weights_id, sample_positions


class ReDrafter(StatelessDrafter):
    """A trained recurrent drafter bound to a target.

    config, params: from a checkpoint; params are host or native arrays by the names of
    `portadraft.core.recurrent`. draft_vocabulary: (V',) target ids in the drafter's order,
    or None where the drafter predicts the whole vocabulary.

    Raises: IncompatibleDrafter where sizes do not fit the target.
    """

    name = "redrafter"

    def __init__(
        self,
        target: Target,
        config: RecurrentConfig,
        params: Mapping[str, Any],
        draft_vocabulary: Any | None = None,
    ) -> None:
        ops, facts = target.ops, target.facts
        embeddings = target.embeddings()
        if config.hidden_size != facts.hidden_size or config.embedding_size != embeddings.shape[1]:
            raise IncompatibleDrafter(
                f"drafter: made for hidden size {config.hidden_size} and embeddings of {config.embedding_size}, but "
                f"the target has {facts.hidden_size} and {embeddings.shape[1]}; use this model's drafter or train one"
            )
        if config.vocabulary_size > facts.vocabulary_size or (
            draft_vocabulary is None and config.vocabulary_size != facts.vocabulary_size
        ):
            raise IncompatibleDrafter(
                f"drafter: its vocabulary of {config.vocabulary_size} does not fit the target's of "
                f"{facts.vocabulary_size}; use the drafter of this model or train one"
            )
        self.config = config
        self._ops = ops
        self._embeddings = embeddings
        self._params = {name: ops.asarray(value, facts.dtype) for name, value in params.items()}
        self._vocabulary = None if draft_vocabulary is None else ops.asarray(draft_vocabulary, "int32")
        self._searches: dict[tuple[int, int], Callable[[Array, Array], tuple[Array, ...]]] = {}
        if config.tied_head:
            rows, bias = target.head_rows(), target.head_bias()
            if self._vocabulary is not None:
                rows = ops.take(rows, self._vocabulary)
                bias = None if bias is None else ops.take(bias, self._vocabulary)
            self._params["head.weight"] = rows
            if bias is not None:
                self._params["head.bias"] = bias

    @cached_property
    def id(self) -> str:
        """Names its trained weights, as `portadraft.identity` does, for profiles; a tied head is the target's own."""
        own = {k: v for k, v in self._params.items() if not (self.config.tied_head and k.startswith("head."))}
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        picked = [
            self._ops.to_numpy(self._ops.cast(own[name], "float32")).reshape(-1)[list(positions)]
            for name, positions in sample_positions(shapes)
        ]
        return make_weights_id(shapes, np.concatenate(picked) if picked else np.zeros(0, np.float32))

    def candidates(self, shape: BeamShape) -> int:
        """The width. Raises: InvalidArgument where the drafter predicts fewer tokens than that."""
        if shape.width > self.config.vocabulary_size:
            raise InvalidArgument(
                f"width={shape.width}: the drafter predicts only {self.config.vocabulary_size} tokens; take fewer"
            )
        return shape.width

    def draft(self, roots: Array, features: Array, shape: BeamShape) -> Beam:
        size = shape.width, shape.length
        if size not in self._searches:
            known = (self._ops, self.config, self._params, self._embeddings, self._vocabulary)
            self._searches[size] = self._ops.compile(partial(_search, known, *size))
        return Beam(*self._searches[size](roots, features))

    def draft_lengths(self, roots: Array, features: Array, width: int, length: int) -> list[Beam]:
        """What `draft` returns for 1 … `length` tokens, from one search."""
        return beam_search_lengths(
            self._ops, self.config, self._params, self._embeddings, roots, features, width, length, self._vocabulary
        )

    def draw_chain(self, roots: Array, features: Array, temperature: float, uniforms: Array) -> Chain:
        """A chain of sampled tokens and their distributions, for `portadraft.core.rejection`."""
        return sample_chain(
            self._ops,
            self.config,
            self._params,
            self._embeddings,
            roots,
            features,
            temperature,
            uniforms,
            self._vocabulary,
        )


def _search(known: tuple[Any, ...], width: int, length: int, roots: Array, features: Array) -> tuple[Array, ...]:
    """`beam_search` from arrays to arrays, as `Ops.compile` wants it."""
    ops, config, params, embeddings, vocabulary = known
    beam = beam_search(ops, config, params, embeddings, roots, features, width, length, vocabulary)
    return beam.tokens, beam.lengths, beam.scores
