"""What holds for every recurrence, on random blocks of each: its short form, tape and rollback equal the twin."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import (
    recurrences,
    test_channel_delta,
    test_gated_delta,
    test_linear_attention,
    test_rg_lru,
    test_selective_scan,
    test_ssd,
)
from tests.examples import examples
from tests.recurrences import Block

MakeBlocks = Callable[[], st.SearchStrategy[Block]]
every_recurrence = pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(test_gated_delta.blocks, id="gated delta rule"),
        pytest.param(test_channel_delta.blocks, id="Kimi delta attention"),
        pytest.param(test_ssd.blocks, id="SSD"),
        pytest.param(test_selective_scan.blocks, id="selective scan"),
        pytest.param(test_linear_attention.blocks, id="lightning attention"),
        pytest.param(test_rg_lru.blocks, id="RG-LRU"),
    ],
)


@every_recurrence
@examples(100)
@given(st.data())
def test_outputs_and_every_rollback_equal_the_twin(blocks: MakeBlocks, data: st.DataObject) -> None:
    recurrences.check_outputs_and_every_rollback(data.draw(blocks()))


@every_recurrence
@examples(50)
@given(st.data())
def test_each_row_keeps_its_own_number_of_tokens(blocks: MakeBlocks, data: st.DataObject) -> None:
    block = data.draw(blocks())
    recurrences.check_each_row_keeps_its_own(block, data.draw(recurrences.counts(block)))


@every_recurrence
@examples(40)
@given(st.data())
def test_stacked_layers_roll_back_like_each_layer(blocks: MakeBlocks, data: st.DataObject) -> None:
    block = data.draw(blocks())
    keep = data.draw(st.lists(recurrences.counts(block), min_size=1, max_size=3))
    recurrences.check_stacked_layers(block, keep, axis=data.draw(st.sampled_from([0, 1])))


@every_recurrence
@examples(50)
@given(st.data())
def test_joined_blocks_are_one_block(blocks: MakeBlocks, data: st.DataObject) -> None:
    block = data.draw(blocks())
    recurrences.check_joined_blocks(block, data.draw(recurrences.cuts(block)))


@every_recurrence
@examples(50)
@given(st.data())
def test_parts_of_a_tape_lead_from_state_to_state(blocks: MakeBlocks, data: st.DataObject) -> None:
    block = data.draw(blocks())
    recurrences.check_parts(block, data.draw(recurrences.cuts(block)))


@every_recurrence
@examples(40)
@given(st.data())
def test_tokens_that_are_not_kept_are_not_read(blocks: MakeBlocks, data: st.DataObject) -> None:
    block = data.draw(blocks())
    recurrences.check_dropped_tokens_are_not_read(block, data.draw(recurrences.counts(block)))
