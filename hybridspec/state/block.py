"""What passes through a model at once, and what each of its rows keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.errors import SessionError

#: For each row, the pending tokens that stay, by their index, each after the one that it follows.
Paths = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Block:
    """The tokens of one forward pass.

    Attributes:
        tokens: ``[B, T]`` int64, on the model's device.
        positions: ``[B, T]`` int64, likewise.
        lengths: how many tokens count in each row, ``B`` numbers; what follows them is padding.
        parents: ``[B, T]`` int64: the column of the token that each follows, -1 for the last committed one. None for
            a chain, in which each follows the one before it.
    """

    tokens: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    parents: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int], start: int, device: torch.device | str = "cpu") -> "Block":
        """One row of tokens that follow each other, the first at position ``start``."""
        positions = torch.arange(start, start + len(tokens), device=device)
        return cls(torch.tensor([tokens], device=device), positions.unsqueeze(0), (len(tokens),))

    @classmethod
    def rows_of(cls, tokens: Tensor, start: int | Tensor = 0) -> "Block":
        """Rows ``[B, T]`` of one length, each a chain that begins at position ``start``."""
        count, length = tokens.shape
        positions = torch.arange(length, device=tokens.device) + start
        return cls(tokens, positions.unsqueeze(0).expand(count, -1), (length,) * count)

    @property
    def width(self) -> int:
        """Columns, ``T``."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """One row without padding, whose tokens follow each other."""
        return self.parents is None and self.lengths == (self.width,)

    def columns(self, start: int, stop: int) -> "Block":
        """The columns from ``start`` to before ``stop`` of a chain."""
        return Block(self.tokens[:, start:stop], self.positions[:, start:stop], (stop - start,))

    @classmethod
    def joined(cls, blocks: "Sequence[Block]") -> "Block":
        """Chains that follow each other, as one."""
        tokens, positions = (
            torch.cat(parts, 1) for parts in zip(*((b.tokens, b.positions) for b in blocks), strict=True)
        )
        return cls(tokens, positions, (tokens.shape[1],))

    def padded(self, width: int) -> "Block":
        """A chain of ``width`` tokens that begins with this one; its last token is repeated."""
        extra = width - self.width
        if not extra:
            return self
        tokens = torch.cat([self.tokens, self.tokens[:, -1:].expand(-1, extra)], 1)
        return Block.rows_of(tokens, self.positions[0, :1])


def kept_prefix(paths: Paths, pending: int) -> int:
    """How many tokens every row keeps, where all rows keep the same number of the first ones.

    Raises:
        SessionError: a row keeps more than is pending, other tokens than its first, or another number than the others.
    """
    keep = len(paths[0])
    if keep > pending:
        raise SessionError(f"cannot keep {keep} of {pending} pending tokens")
    if any(list(path) != list(range(keep)) for path in paths):
        raise SessionError(
            f"cannot keep {[list(path) for path in paths]}: every row must keep the same number of its first tokens"
        )
    return keep
