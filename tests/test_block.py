"""Blocks, and the paths of them that a commit keeps."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.errors import SessionError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.state.block import Block, kept_prefix
from tests.comparison import assert_holds
from tests.examples import examples

MakeRunner = Callable[..., TargetRunner]
tokens = st.lists(st.integers(0, 90), min_size=1, max_size=9)


@examples(30)
@given(tokens, st.integers(0, 50), st.data())
def test_a_chain_is_cut_joined_and_padded(ids: list[int], start: int, data: st.DataObject) -> None:
    block = Block.chain(ids, start)
    assert block.tokens.tolist() == [ids]
    assert block.positions.tolist() == [list(range(start, start + len(ids)))]
    assert block.is_chain and block.width == len(ids) and block.lengths == (len(ids),)
    cut = data.draw(st.integers(0, len(ids)))
    again = Block.joined([block.columns(0, cut), block.columns(cut, len(ids))])
    extra = data.draw(st.integers(0, 4))
    padded = block.padded(len(ids) + extra)
    assert padded.tokens.tolist() == [ids + ids[-1:] * extra]
    assert padded.positions.tolist() == [list(range(start, start + len(ids) + extra))]
    for same in (again, padded.columns(0, len(ids)), Block.rows_of(torch.tensor([ids]), start)):
        assert torch.equal(same.tokens, block.tokens) and torch.equal(same.positions, block.positions)
        assert same.lengths == block.lengths


def test_what_is_no_chain() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert not Block.rows_of(ids).is_chain
    assert not Block(ids[:1], ids[:1], (2,)).is_chain
    assert not Block(ids[:1], ids[:1], (3,), parents=torch.tensor([[-1, 0, 0]])).is_chain


@examples(60)
@given(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=3), st.integers(0, 5))
def test_what_a_commit_keeps(paths: list[list[int]], pending: int) -> None:
    """The obvious twin: all rows are the same beginning of what is pending."""
    count = len(paths[0])
    if count <= pending and all(path == list(range(pending))[:count] for path in paths):
        assert kept_prefix(paths, pending) == count
    else:
        with pytest.raises(SessionError, match="cannot keep"):
            kept_prefix(paths, pending)


@pytest.mark.parametrize("mode", ["tape", "slots", "recompute"])
def test_a_path_that_no_cache_can_keep_is_refused_and_leaves_all_intact(make_runner: MakeRunner, mode: str) -> None:
    session = make_runner("plain", mode).start([5, 6, 7])
    session.verify([7, 1, 2])
    for path in ([0, 2], [1], [0, 1, 2, 3]):
        with pytest.raises(SessionError, match="cannot keep"):
            session.cache.commit([path])
    session.commit(2)
    assert_holds(session, [5, 6, 7, 1])
