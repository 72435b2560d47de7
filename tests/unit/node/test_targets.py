"""What a person means by an artifact, and what is said when nothing is called so."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvnet.errors import UnknownNameError
from kvnet.exchange.lane import InlineLane
from kvnet.format.hashes import FingerprintHash
from kvnet.store.memory import MemoryStore
from kvnet.store.names import NameBook
from kvnet_node.operations.targets import resolve_version
from tests.unit.store.samples import sample


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("projct", "did you mean project? kvnet list"),
        ("projct@1", "did you mean project@1?"),
        ("nothing-like-it", "kvnet list shows names and hashes"),
        ("project@7", "project alone is the newest"),
    ],
)
async def test_an_unknown_name_is_answered_with_those_it_is_close_to(tmp_path: Path, text: str, hint: str) -> None:
    names = NameBook(tmp_path)
    made = sample(range(20))
    for name in ("project", "handbook"):
        names.add(
            name,
            artifact=made.hash,
            model="m",
            fingerprint=FingerprintHash(bytes(32)),
            context=b"{}",
            file_order=(),
            created_s=1,
        )
    services = SimpleNamespace(lane=InlineLane(), names=names, store=MemoryStore())
    with pytest.raises(UnknownNameError) as raised:
        await resolve_version(services, text)  # type: ignore[arg-type]
    assert hint in raised.value.hint
