"""What members are called: by their labels, told apart where several have the same. Two Macs may have one host name.

A label is what its owner chose: a part of an id stands beside every label that might be taken for another one, for an
id, or for words of this program.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvnet.errors import UsageError
from kvnet.protocol.escaping import escape_text
from kvnet.protocol.ids import PeerId, peer_text, short_peer_text
from kvnet.trust.keys import publisher_text
from kvnet.trust.roster import Member, Roster

TAG_CHARACTERS = 8
"""Of the end of a peer id or publisher id, where labels are not enough."""
THIS_MACHINE: Final = "this machine"
"""What the keys of this node are called where it says who signed something."""

_OURS: Final = (THIS_MACHINE, "memory", "RAM", "disk", "this node's disk")
"""Where something may come from that is no member."""
_PLAIN: Final = re.compile(r"(?!.*[a-z0-9]{20})[a-z0-9]+(?:[ ._'-]+[a-z0-9]+)*")
"""Labels, folded, that read as nothing but a name: no punctuation of sentences, and no run as long as an id."""
_ALIKE: Final = str.maketrans("01i\u2019", "oll'")
"""What is taken for another character at a glance."""


@dataclass(frozen=True, slots=True)
class Names:
    """What is known of what others are called; whoever is not in it is shown by its id.

    Attributes:
        peers: escaped, by peer id.
        signers: escaped, by publisher id.
    """

    peers: Mapping[PeerId, str] = field(default_factory=dict)
    signers: Mapping[bytes, str] = field(default_factory=dict)

    def signer(self, publisher: bytes) -> str:
        """The name of a signer, else its publisher id."""
        return self.signers.get(publisher) or publisher_text(publisher)


def names_of(members: Iterable[Member]) -> dict[bytes, str]:
    """What each member is called, by publisher id: its label, with a part of its peer id when another has the same.

    Keys of one machine are called the same; who has no label is called by its publisher id.
    """
    listed = list(members)
    alike: dict[str, list[Member]] = {}
    for each in listed:
        alike.setdefault(_folded(each.label), []).append(each)
    return {each.publisher: _name(each, alike[_folded(each.label)]) for each in listed}


def peer_names(members: Iterable[Member]) -> dict[PeerId, str]:
    """What each machine is called, by peer id; those of members without a label are left out.

    Args:
        members: of all namespaces together; of a machine in several, the first counts.
    """
    first: dict[PeerId, Member] = {}
    for each in members:
        for peer in each.peers:
            first.setdefault(PeerId(peer), each)
    names = names_of({each.publisher: each for each in first.values()}.values())
    return {peer: names[each.publisher] for peer, each in first.items() if each.label.strip()}


def signer_names(members: Iterable[Member], own: Collection[bytes]) -> dict[bytes, str]:
    """What each signer is called, by publisher id; those without a label are left out.

    Args:
        members: of all namespaces together; of a publisher in several, the first counts.
        own: publisher ids of this node's keys.
    """
    first: dict[bytes, Member] = {}
    for each in members:
        if each.label.strip():
            first.setdefault(each.publisher, each)
    return names_of(first.values()) | dict.fromkeys(own, THIS_MACHINE)


def members_called(members: Sequence[Member], wanted: str) -> list[Member]:
    """The members that a label, a publisher id, a peer id, or the end of an id means.

    That of a whole publisher id is nobody else's, whatever others call themselves.
    """
    text = wanted.strip()
    exact = [each for each in members if text == publisher_text(each.publisher)]
    if exact or not text:
        return exact
    names = names_of(members)
    meant = [each for each in members if text in {each.label.strip(), names[each.publisher], *_peers(each)}]
    end = text.removeprefix("…")
    if meant or len(end) < TAG_CHARACTERS:
        return meant
    return [
        each for each in members if any(id_.endswith(end) for id_ in (publisher_text(each.publisher), *_peers(each)))
    ]


def machine_called(
    roster: Roster, wanted: str, keys_of_machine: Callable[[Roster, bytes], frozenset[bytes]]
) -> list[Member]:
    """All keys of the one machine that a label or an id means.

    Raises:
        UsageError: no member is called so, or members of several machines are.
    """
    members = list(roster.members.values())
    named = members_called(members, wanted)
    keys = keys_of_machine(roster, named[0].publisher) if named else frozenset()
    if not keys or any(each.publisher not in keys for each in named):
        raise not_one(members, named, wanted)
    return [each for each in members if each.publisher in keys]


def not_one(members: Sequence[Member], found: Sequence[Member], wanted: str) -> UsageError:
    """That a name means nobody, or several, who are named so that one can be chosen."""
    names = names_of(members)
    shown = "; ".join(f"{names[each.publisher]} {publisher_text(each.publisher)}" for each in found)
    return UsageError(
        f"expected one member called {wanted.strip()[:80]!r}, found {f'{len(found)}: {shown}' if found else 'none'}",
        hint="name one of them by its publisher id" if found else "kvnet swarm members shows what they are called",
    )


def _name(member: Member, alike: Sequence[Member]) -> str:
    label = escape_text(member.label).strip()
    if not label:
        return publisher_text(member.publisher)
    alone = len(alike) == 1 or frozenset.intersection(*(frozenset(each.peers) for each in alike))
    # Nobody is to look like another by having its distinction, or its id, for a label.
    if alone and _is_plain(member.label):
        return label
    tag = (
        short_peer_text(PeerId(member.peers[0]))
        if member.peers
        else "…" + publisher_text(member.publisher)[-TAG_CHARACTERS:]
    )
    return f"{label} ({tag})"


def _peers(member: Member) -> list[str]:
    return [peer_text(PeerId(peer)) for peer in member.peers]


def _is_plain(label: str) -> bool:
    folded = _folded(label)
    return _PLAIN.fullmatch(folded) is not None and folded not in map(_folded, _OURS)


def _folded(label: str) -> str:
    """Labels that look alike are alike: in whatever case, with whatever marks on their letters."""
    letters = unicodedata.normalize("NFKD", label).casefold()
    bare = "".join(char for char in letters if not unicodedata.combining(char))
    return " ".join(bare.split()).translate(_ALIKE)
