"""A prompt as a chain of hashes: what is needed to see which beginning two prompts share, and none of their text.

A part (the tools, the system prompt, a message) is cut into pieces of 1,024 characters, about one block of tokens. The
hash of a piece covers everything before it, so that two prompts share a beginning exactly as far as their hashes agree.
Beside the chain of what was sent runs a second one, of the same text with everything *mended* that is known to vary by
itself: where the second goes on and the first does not, a change of that kind is what stands in the way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

PIECE_CHARACTERS = 1024
CHARACTERS_PER_TOKEN = 4
"""The stated rule where no usage says how many tokens a prompt had; a fair mean over English prose and code."""

NO_FEATURES: Mapping[str, int] = {}


def digest(*texts: str) -> int:
    """64 bits over some texts, each told apart from the next."""
    hashed = blake2b(digest_size=8)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        hashed.update(len(data).to_bytes(8, "little"))
        hashed.update(data)
    return int.from_bytes(hashed.digest(), "little")


def estimated_tokens(characters: int) -> int:
    """About how many tokens a text of so many characters is."""
    return -(-characters // CHARACTERS_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a prompt, before it is hashed.

    Attributes:
        kind: "hidden", "tools", "system" or "message".
        text: all of it.
        mended: the same without what varies by itself; the text itself when there is nothing of that kind.
        role: of a message.
        features: digests by which two versions of the part are told apart.
    """

    kind: str
    text: str
    mended: str
    role: str = ""
    features: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a prompt: the hash of all before it, and how many characters that is."""

    hash: int
    characters: int


Places = tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A prompt up to the end of a part.

    Attributes:
        parent: the prompt before the part.
        kind, role: of the part.
        part: digest of the part alone, as it was sent.
        mended_part: the same, as mended.
        features: of the part.
        sent: places within the part, the last one at its end.
        mended: the same of the mended prompt.
        n_parts: parts up to here.
    """

    parent: "Step | None"
    kind: str
    role: str
    part: int
    mended_part: int
    features: Mapping[str, int]
    sent: Places
    mended: Places
    n_parts: int

    def upwards(self) -> Iterator["Step"]:
        """This step and those before it, the last one first."""
        step: Step | None = self
        while step is not None:
            yield step
            step = step.parent

    def path(self) -> list["Step"]:
        """The steps from the first part on."""
        return list(self.upwards())[::-1]


def root(*names: str) -> Step:
    """The empty prompt of a scope: prompts of different names share nothing."""
    hashed = digest(*names)
    begin = (Place(hashed, 0),)
    return Step(None, "hidden", "", hashed, hashed, NO_FEATURES, begin, begin, 0)


def extend(parent: Step, part: Part) -> Step:
    """The prompt with one more part."""
    name = f"{part.kind}/{part.role}"
    sent = _places(parent.sent[-1], name, part.text)
    unchanged = part.mended is part.text
    same = unchanged and parent.mended[-1] == parent.sent[-1]
    mended = sent if same else _places(parent.mended[-1], name, part.mended)
    whole = digest(name, part.text)
    whole_mended = whole if unchanged else digest(name, part.mended)
    return Step(parent, part.kind, part.role, whole, whole_mended, part.features, sent, mended, parent.n_parts + 1)


def _places(before: Place, name: str, text: str) -> Places:
    hashed, characters = before.hash, before.characters
    places = []
    for begin in range(0, max(1, len(text)), PIECE_CHARACTERS):
        piece = text[begin : begin + PIECE_CHARACTERS]
        hashed = digest(name, str(hashed), piece)
        characters += len(piece)
        places.append(Place(hashed, characters))
    return tuple(places)
