"""Members, read by another implementation: written from ``docs/protocol.md`` and ``docs/format.md`` alone.

Nothing of kvnet is imported here. It is as short as it can be and reads what is sound; what must be refused is tested
with the code itself.
"""

import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import cbor2
from blake3 import blake3
from nacl.exceptions import BadSignatureError
from nacl.public import SealedBox
from nacl.signing import SigningKey, VerifyKey


def derive(context: str, material: bytes) -> bytes:
    """Format, section 1."""
    return blake3(material, derive_key_context=context).digest()


def keyed(key: bytes, data: bytes) -> bytes:
    """Format, section 1."""
    return blake3(data, key=key).digest()


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether a signature is good."""
    try:
        VerifyKey(public).verify(message, signature)
    except BadSignatureError:
        return False
    return True


@dataclass(frozen=True)
class Said:
    """A statement: format, section 10, and protocol, section 17."""

    kind: str
    signer: bytes
    body: dict[str, Any]
    envelope: bytes

    @property
    def order(self) -> tuple[int, bytes]:
        """By sequence, then by envelope."""
        return self.body["sequence"], self.envelope


def open_envelope(data: bytes) -> Said:
    """A statement whose signature fits."""
    stream = io.BytesIO(data)
    protected, unprotected, payload, signature = cbor2.CBORDecoder(stream).decode()
    assert not stream.read()
    assert unprotected == {}
    header = cbor2.loads(protected)
    assert header[1] == -8
    kind = header[3].removeprefix("application/vnd.kvnet.").removesuffix("+cbor")
    signer = header[4]
    signed = ["Signature1", protected, f"kvnet 2026-11 statement {kind}".encode(), payload]
    assert verify(signer, cbor2.dumps(signed), signature)
    body = cbor2.loads(payload)
    assert cbor2.dumps(body, canonical=True) == payload
    assert body["version"] == 1
    if kind == "key-rotation":
        said = b"kvnet 2026-11 key rotation\0" + signer + body["new"] + body["sequence"].to_bytes(8, "big")
        assert verify(body["new"], said, body["new_signature"])
    return Said(kind, signer, body, data)


def proof_message(role: bytes, own: bytes, other: bytes, nonce_initiator: bytes, nonce_responder: bytes) -> bytes:
    """``m`` of section 4."""
    ids = b"".join(len(each).to_bytes(2, "big") + each for each in (own, other))
    return b"kvnet namespace proof v1" + role + ids + nonce_initiator + nonce_responder


def read_invitation(text: str) -> Said:
    """The text of an invitation: section 19."""
    joined = "".join(text.split()).lower()
    assert joined.startswith("kvinv1")
    letters = joined[6:].upper()
    data = base64.b32decode(letters + "=" * (-len(letters) % 8))
    envelope, check = data[:-4], data[-4:]
    assert derive("kvnet 2026-11 invitation text", envelope)[:4] == check
    return open_envelope(envelope)


def enrol(invitation: Said, m: bytes, seed: bytes, label: str) -> dict[str, Any]:
    """What a guest sends: section 19."""
    key = SigningKey(seed)
    publisher = bytes(key.verify_key)
    said = invitation.body["id"] + len(m).to_bytes(2, "big") + m + publisher + label.encode()
    return {
        "type": "enrol",
        "request_id": 0,
        "invitation": invitation.body["id"],
        "proof": keyed(derive("kvnet 2026-11 enrolment proof", invitation.body["secret"]), said),
        "publisher": publisher,
        "signature": key.sign(b"kvnet 2026-11 enrolment\0" + said).signature,
        "label": label,
    }


def read_namespace_file(data: bytes) -> dict[str, Any]:
    """A namespace file: section 19."""
    file: dict[str, Any] = cbor2.loads(data)
    assert cbor2.dumps(file, canonical=True) == data
    assert set(file) == {"magic", "version", "name", "prefix_secret", "lookup_secret", "checksum"}
    assert (file["magic"], file["version"]) == ("kvnet namespace", 1)
    secrets = file["prefix_secret"] + file["lookup_secret"]
    assert derive("kvnet 2026-11 namespace file", secrets + file["name"].encode()) == file["checksum"]
    return file


def open_box(seed: bytes, box: bytes) -> bytes:
    """A sealed secret: section 19."""
    return SealedBox(SigningKey(seed).to_curve25519_private_key()).decrypt(box)


@dataclass(frozen=True)
class Roster:
    """Section 19, members."""

    members: set[bytes]
    removed: dict[bytes, int]
    rekeying: Said | None


def roster(founder: bytes, statements: Iterable[Said], *, mine: bool) -> Roster:
    """Who is in a namespace."""
    said = list(statements)
    banned: dict[bytes, int] = {}
    vouched: dict[bytes, None] = {}
    allowed: list[Said] = []
    rekeyings = [each for each in said if each.kind == "rekey"]
    for each in sorted(rekeyings, key=lambda each: (each.signer != founder, *each.order)):
        at_that_point = _members(founder, vouched, banned, said)
        if each.signer != founder and not (mine and each.signer in at_that_point):
            continue
        allowed.append(each)
        for who in each.body["removed"]:
            if who != founder:
                banned[who] = max(banned.get(who, 0), each.body["sequence"])
                vouched.pop(who, None)
        vouched |= {sealed["member"]: None for sealed in each.body["sealed"] if sealed["member"] not in banned}
    members = _members(founder, vouched, banned, said)
    counting = [each for each in allowed if each.signer in members]
    return Roster(
        members,
        {who: at for who, at in banned.items() if who not in members},
        max(counting, key=lambda each: each.order, default=None),
    )


def _members(founder: bytes, vouched: Iterable[bytes], banned: dict[bytes, int], said: list[Said]) -> set[bytes]:
    steps = dict.fromkeys(list(dict.fromkeys([founder, *vouched]))[:128], 0)
    letting_in = sorted((each for each in said if each.kind in {"membership", "key-rotation"}), key=lambda e: e.order)
    nth = {each.envelope: 0 for each in letting_in}
    for place, each in enumerate(letting_in):
        nth[each.envelope] = sum(before.signer == each.signer for before in letting_in[:place])
    done: set[bytes] = set()
    while True:
        waiting = [each for each in letting_in if each.signer in steps and each.envelope not in done]
        if not waiting:
            return set(steps)
        chosen = min(waiting, key=lambda each: (steps[each.signer], nth[each.envelope], *each.order))
        done.add(chosen.envelope)
        who = chosen.body["member" if chosen.kind == "membership" else "new"]
        late = chosen.body["sequence"] > banned.get(who, -1)
        if who not in steps and who != chosen.signer and late and len(steps) < 128:
            steps[who] = steps[chosen.signer] + 1
