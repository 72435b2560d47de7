import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import CompatibilityError, IntegrityError, MalformedError
from kvnet.format.chunks import (
    ABSENT,
    ChunkEntry,
    ChunkKind,
    ChunkPlan,
    LayerGroup,
    decode_page,
    decode_pages,
    encode_pages,
    groups_from_counts,
    layer_groups,
    page_count,
    page_size_bytes,
    pages_root,
)
from kvnet.format.fingerprint import LayerLayout
from kvnet.format.hashes import ChunkHash, blake3_hash
from kvnet.format.limits import MAX_CHUNKS, MAX_CONTEXT_BYTES, MAX_TOKENS
from kvnet.format.tensor import DType, LayerKind, tile_size_bytes
from tests.unit.format.examples import PLAIN, ROUNDS, layout

SMALL = LayerKind(cache="kv", heads=1, k_dim=8, v_dim=4, dtype=DType.BFLOAT16)
WIDE = LayerKind(cache="kv", heads=64, k_dim=128, v_dim=128, dtype=DType.FLOAT32)
TOO_WIDE = LayerKind(cache="kv", heads=65, k_dim=128, v_dim=128, dtype=DType.FLOAT32)
ROTATING = LayerKind(cache="rotating", heads=2, k_dim=8, v_dim=8, dtype=DType.FLOAT32, window=16)

KINDS = st.builds(
    LayerKind,
    cache=st.just("kv"),
    heads=st.integers(1, 16),
    k_dim=st.integers(1, 128),
    v_dim=st.integers(1, 128),
    dtype=st.sampled_from(DType),
)


@st.composite
def layouts(draw: st.DrawFn) -> LayerLayout:
    kinds = draw(st.lists(KINDS, min_size=1, max_size=3, unique=True))
    order = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=40))
    used = list(dict.fromkeys(order))
    return LayerLayout(kinds=tuple(kinds[kind] for kind in used), order=bytes(used.index(kind) for kind in order))


def plan_of(n_tokens: int, layers: LayerLayout, context_size_bytes: int = 0) -> ChunkPlan:
    return ChunkPlan(n_tokens, layers, layer_groups(layers), context_size_bytes)


@given(layouts())
def test_groups_cover_the_layers_in_order_with_one_kind_each_and_full_tiles_of_a_mebibyte(layers: LayerLayout) -> None:
    groups = layer_groups(layers)
    assert groups_from_counts(layers, [group.n_layers for group in groups]) == groups
    at = 0
    for group in groups:
        assert group.first_layer == at
        assert set(layers.order[at : at + group.n_layers]) == {group.kind}
        at += group.n_layers
        size = tile_size_bytes(layers.kinds[group.kind], group.n_layers, 256)
        assert size <= 4 << 20
        last_of_run = at == len(layers.order) or layers.order[at] != group.kind
        assert size >= 1 << 20 or last_of_run
        # The fewest layers that do.
        assert group.n_layers == 1 or tile_size_bytes(layers.kinds[group.kind], group.n_layers - 1, 256) < 1 << 20
    assert at == len(layers.order)


def test_a_layer_that_fills_a_chunk_is_its_own_group_and_a_larger_one_is_refused() -> None:
    assert layer_groups(layout(WIDE, order=bytes(2))) == (LayerGroup(0, 1, 0), LayerGroup(1, 1, 0))
    with pytest.raises(CompatibilityError, match="per layer and block"):
        layer_groups(layout(TOO_WIDE))


def test_layers_this_version_cannot_move_are_refused_by_name() -> None:
    for call in (lambda: layer_groups(layout(PLAIN, ROTATING)), lambda: groups_from_counts(layout(ROTATING), [1])):
        with pytest.raises(CompatibilityError, match="'rotating'"):
            call()


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ([], "3 layers"),
        ([1, 1], "3 layers"),
        ([1, 1, 2], "3 layers"),
        ([2, 0, 1], "layer groups"),
        ([3], "one kind"),
        ([1, 2], "one kind"),
        ([1 << 62], "3 layers"),
    ],
)
def test_groups_that_do_not_cover_the_layers_or_mix_kinds_are_refused(counts: list[int], reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        groups_from_counts(layout(PLAIN, SMALL, order=bytes((0, 0, 1))), counts)


def test_groups_whose_tiles_are_too_large_are_refused() -> None:
    with pytest.raises(MalformedError, match="4194304"):
        groups_from_counts(layout(PLAIN, order=bytes(30)), [11, 19])
    with pytest.raises(MalformedError, match="16777216"):
        groups_from_counts(layout(TOO_WIDE), [1])


@given(layouts(), st.integers(1, 20_000), st.sampled_from([0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1]))
def test_a_plan_holds_every_byte_once_and_in_order(layers: LayerLayout, n_tokens: int, context_size_bytes: int) -> None:
    plan = plan_of(n_tokens, layers, context_size_bytes)
    specs = list(plan)
    assert [spec.index for spec in specs] == list(range(len(plan)))
    kinds = [spec.kind for spec in specs]
    assert kinds == sorted(kinds, key=[ChunkKind.TOKENS, ChunkKind.CONTEXT, ChunkKind.TILE].index)
    for kind, total in (
        (ChunkKind.TOKENS, 4 * n_tokens),
        (ChunkKind.CONTEXT, context_size_bytes),
        (ChunkKind.TILE, n_tokens * layers.bytes_per_token),
    ):
        assert sum(spec.raw_size_bytes for spec in specs if spec.kind is kind) == total
    assert plan.raw_size_bytes == sum(spec.raw_size_bytes for spec in specs)
    assert all(0 < spec.raw_size_bytes <= 16 << 20 for spec in specs)
    tokens = [spec for spec in specs if spec.kind is ChunkKind.TOKENS]
    assert [spec.first_token for spec in tokens] == list(range(0, n_tokens, 4096))
    assert sum(spec.n_tokens for spec in tokens) == n_tokens
    for block in range(plan.n_blocks):
        tiles = [plan[index] for index in plan.tiles_of_block(block)]
        assert [(tile.block, tile.group) for tile in tiles] == [(block, group) for group in range(len(plan.groups))]
        assert {tile.first_token for tile in tiles} == {block * 256}
        assert sum(tile.n_layers for tile in tiles) == len(layers.order)


@given(layouts(), st.integers(1, 20_000), st.data())
def test_a_prefix_needs_its_token_ids_and_the_tiles_that_cover_it(
    layers: LayerLayout, n_tokens: int, data: st.DataObject
) -> None:
    plan = plan_of(n_tokens, layers, 5)
    wanted = data.draw(st.integers(0, n_tokens))
    needed = plan.needed_for(wanted)
    assert needed == sorted(set(needed))
    expected = [spec.index for spec in plan if spec.kind is not ChunkKind.CONTEXT and spec.first_token < wanted]
    assert needed == expected


def test_a_cut_inside_a_block_needs_the_whole_block_and_no_more() -> None:
    plan = plan_of(1205, layout(PLAIN, order=bytes(30)))
    assert len(plan.groups) == 10
    assert plan.needed_for(1) == [0, *range(1, 11)]
    assert plan.needed_for(256) == [0, *range(1, 11)]
    assert plan.needed_for(257) == [0, *range(1, 21)]
    assert plan.needed_for(1205) == list(range(51))


def test_what_is_not_in_a_plan_is_not_given() -> None:
    plan = plan_of(300, layout())
    for index in (-1, len(plan)):
        with pytest.raises(IndexError):
            plan[index]
    for block in (-1, 2):
        with pytest.raises(IndexError):
            plan.tiles_of_block(block)
    for wanted in (-1, 301):
        with pytest.raises(ValueError, match="tokens"):
            plan.needed_for(wanted)


@pytest.mark.parametrize(
    ("n_tokens", "context_size_bytes", "reason"),
    [
        (0, 0, "tokens"),
        (-1, 0, "tokens"),
        (MAX_TOKENS + 1, 0, "tokens"),
        (1 << 62, 0, "tokens"),
        (1, -1, "context"),
        (1, MAX_CONTEXT_BYTES + 1, "context"),
    ],
)
def test_a_plan_beyond_the_limits_is_refused(n_tokens: int, context_size_bytes: int, reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        plan_of(n_tokens, layout(), context_size_bytes)


def test_too_many_chunks_are_refused_by_arithmetic_alone() -> None:
    layers = layout(WIDE, order=bytes(512))
    groups = layer_groups(layers)
    tracemalloc.start()
    with pytest.raises(MalformedError, match=str(MAX_CHUNKS)):
        ChunkPlan(MAX_TOKENS, layers, groups)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Eight million chunks were asked for.
    assert peak < 1 << 20


def test_groups_that_start_elsewhere_than_they_say_are_refused() -> None:
    with pytest.raises(MalformedError, match="from layer 0"):
        ChunkPlan(1, layout(), (LayerGroup(1, 1, 0),))


def test_plans_with_equal_fields_are_equal() -> None:
    assert plan_of(300, layout()) == plan_of(300, layout())


ENTRIES = st.builds(
    ChunkEntry, st.integers(1, (1 << 32) - 1), st.binary(min_size=32, max_size=32).filter(any)
) | st.just(ABSENT)


@given(st.lists(ENTRIES, min_size=1, max_size=40))
def test_a_chunk_list_round_trips(entries: list[ChunkEntry]) -> None:
    pages = encode_pages(entries)
    assert decode_pages(pages, len(entries), pages_root(pages)) == tuple(entries)
    assert decode_page(pages[0], len(entries)) == tuple(entries)


def test_pages_hold_2048_entries_and_the_root_covers_all_of_them() -> None:
    entries = [ChunkEntry(number + 1, blake3_hash(b"%d" % number)) for number in range(4097)]
    pages = encode_pages(entries)
    assert [len(page) for page in pages] == [page_size_bytes(4097, page) for page in range(3)] == [73_728, 73_728, 36]
    assert page_count(4097) == 3
    assert page_size_bytes(4097, 3) == 0
    root = pages_root(pages)
    assert root == blake3_hash(b"".join(blake3_hash(page) for page in pages))
    assert decode_pages(pages, 4097, root) == tuple(entries)
    swapped = [pages[1], pages[0], pages[2]]
    with pytest.raises(IntegrityError, match="root"):
        decode_pages(swapped, 4097, root)
    for wrong in (pages[:2], [*pages, pages[2]], [pages[0], pages[1][:-36], pages[2] + pages[1][-36:]], []):
        with pytest.raises(MalformedError, match="chunk list"):
            decode_pages(wrong, 4097, root)


def test_an_absent_chunk_is_length_zero_and_a_zero_hash_together() -> None:
    assert ABSENT.absent
    assert not ChunkEntry(1, blake3_hash(b"")).absent
    assert encode_pages([ABSENT]) == [bytes(36)]
    for length, digest in ((0, b"\1" * 32), (1, bytes(32)), (-1, b"\1" * 32), (1 << 32, b"\1" * 32), (1, b"\1" * 31)):
        with pytest.raises(MalformedError, match="chunk entry"):
            ChunkEntry(length, ChunkHash(digest))


@pytest.mark.parametrize("size", [0, 35, 37, 2049 * 36])
def test_a_page_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(MalformedError, match="page"):
        decode_page(bytes(size))
    with pytest.raises(MalformedError, match="page"):
        decode_page(bytes(size), 1)


@ROUNDS
def test_damaged_pages_are_refused_or_read_as_they_stand(rounds: int) -> None:
    rng = random.Random(5)
    page = encode_pages([ChunkEntry(7, blake3_hash(b"a")), ABSENT, ChunkEntry(9, blake3_hash(b"b"))])[0]
    for _ in range(rounds):
        data = bytearray(page)
        for _change in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        received = bytes(data[: rng.randrange(len(data) + 1)])
        try:
            assert encode_pages(decode_page(received)) == [received]
        except MalformedError:
            continue
