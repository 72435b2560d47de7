"""Small worlds made by hand."""

from collections.abc import Sequence

from kvnet.protocol.speeds import Machine, PrefillSpeed, SpeedPoint
from simulations.chips import LinkKind
from simulations.workload.churn import PresenceChange
from simulations.workload.requests import ROOT, RequestStream, StreamBuilder
from simulations.world.setup import NodeSetup, Partition, WorldSetup

TOKENS_S = 500.0
TOKEN_BYTES = 100_000
LINK = LinkKind("lan", 100e6, 100e6, 0.001)
MACHINE = Machine(PrefillSpeed([SpeedPoint(0, TOKENS_S)]), restore_bytes_s=1e9, restore_fixed_s=0.01)

Asked = tuple[float, int, int, int, int]
"""When, at which node, in which segment, tokens of the prompt, tokens of the answer."""


def node(*, liar: bool = False, site: int = 0, link: LinkKind = LINK, live_bytes: int = 0, **more: int) -> NodeSetup:
    return NodeSetup(MACHINE, link, "model", TOKEN_BYTES, live_bytes=live_bytes, site=site, liar=liar, **more)


def stream(asked: Sequence[Asked], n_nodes: int, segments: Sequence[tuple[int, int]] = ((ROOT, 0),)) -> RequestStream:
    """Requests in a tree of segments, each given by its parent and the block at which it leaves it."""
    builder = StreamBuilder("made", n_nodes, answers_follow=True)
    for parent, begin in segments:
        builder.open_segment(parent, begin)
    for at_s, number, segment, n_input, n_output in asked:
        builder.add(at_s, number, 0, segment, n_input, n_output)
    return builder.build()


def world(
    nodes: Sequence[NodeSetup],
    asked: Sequence[Asked],
    segments: Sequence[tuple[int, int]] = ((ROOT, 0),),
    *,
    changes: Sequence[PresenceChange] = (),
    partitions: Sequence[Partition] = (),
    members: int = 64,
) -> WorldSetup:
    return WorldSetup(
        "made", nodes, stream(asked, len(nodes), segments), changes=changes, partitions=partitions, members=members
    )
