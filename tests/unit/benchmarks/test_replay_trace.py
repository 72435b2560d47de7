from benchmarks.replay_trace import Request, Scale, common_length, requests, shared, symbols, text_of
from benchmarks.replay_trace import _Cut as Cut
from benchmarks.replay_trace import _cut as cut
from benchmarks.replay_trace import _scaled as scaled

SMALL = Scale(blocks=16, characters=64)


def test_fifty_requests_of_five_sessions_fit_a_small_window() -> None:
    wanted = requests(SMALL)
    assert len(wanted) == 50
    assert len({each.session for each in wanted}) == 5
    assert {each.node for each in wanted} == {0, 1}
    assert max(len(symbols(each.messages)) for each in wanted) < 3000


def test_the_same_seed_gives_the_same_requests() -> None:
    assert requests(SMALL, seed=3) == requests(SMALL, seed=3)
    assert requests(SMALL, seed=3) != requests(SMALL, seed=4)


def test_every_block_has_a_text_of_its_own_and_of_one_length() -> None:
    texts = {text_of(session, (first, first + 1), 64) for session in "ab" for first in range(50)}
    assert len(texts) == 100
    assert {len(text) for text in texts} == {64}
    assert text_of("a", (1, 2), 64) == text_of("a", (1, 2), 64)


def test_runs_become_whole_blocks_and_the_rest_is_left_out() -> None:
    assert scaled([[1, 5], [9, 2]], 3) == ((1, 2, 3), (4, 5, 9))
    assert scaled([[1, 2]], 3) == ((1, 2),)


def test_a_conversation_keeps_its_messages_and_gets_one_more() -> None:
    first = cut(((1,), (2,), (3,)), 1, [])
    assert first == Cut(((1,), (2,), (3,)), (1, 3))
    assert cut(((1,), (2,), (3,), (4,)), 1, [first]).ends == (1, 3, 4)


def test_a_rewritten_history_keeps_the_messages_before_the_change() -> None:
    first = Cut(((1,), (2,), (3,), (4,)), (1, 3, 4))
    assert cut(((1,), (2,), (9,), (4,)), 1, [first]).ends == (1, 4)


def test_prompts_share_what_their_recorded_blocks_share() -> None:
    wanted = requests(SMALL)
    by_blocks = 0
    for index, request in enumerate(wanted):
        content = "".join(text for _, text in request.messages)
        earlier = ("".join(text for _, text in each.messages) for each in wanted[:index])
        by_blocks += max((common_length(content, other) // 64 * 64 for other in earlier), default=0)
    in_prompts = sum(common for common, _ in shared(wanted, across_nodes=True))
    assert by_blocks > 0
    assert abs(in_prompts - by_blocks) < 0.1 * by_blocks


def test_more_can_be_shared_across_nodes_than_on_each() -> None:
    wanted = requests(SMALL)
    swarm, own = (sum(hit for hit, _ in shared(wanted, across_nodes=across)) for across in (True, False))
    assert swarm > own > 0


def test_a_request_to_another_node_shares_nothing_with_this_ones_cache() -> None:
    wanted = [Request("s", float(node), node, (("system", "the same"),)) for node in (0, 1, 0)]
    assert [hit for hit, _ in shared(wanted, across_nodes=False)] == [0, 0, len(symbols(wanted[0].messages))]
