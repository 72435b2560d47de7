"""The strict CBOR profile: one value has one encoding, and nothing else is read. The only user of cbor2.

Unsigned integers below 2^63, bytes, text in Unicode normal form C, arrays, maps with text keys in canonical order,
booleans. Source: RFC 8949, section 4.2.1 (deterministic encoding), narrowed.

Order of work on hostile bytes: size, one flat pass over the structure (depth, types, shortest lengths, key order,
text), decoding, schema, re-encoding and comparison with what was received. The flat pass comes before cbor2 because
cbor2 would run decoders for tags (dates, regular expressions, decimals) that this profile has no use for, and believes
declared lengths.
"""

import unicodedata
from typing import Any, Final, TypeVar

import cbor2
import msgspec

from kvnet.errors import MalformedError
from kvnet.format.hashes import BytesLike
from kvnet.format.limits import MAX_CBOR_DEPTH, MAX_CBOR_INT

_T = TypeVar("_T")

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_SIMPLE_VALUES: Final = {20: "", 21: "", 22: "null", 23: "undefined", 25: "a float", 26: "a float", 27: "a float"}
"""What major type 7 holds; only the booleans, 20 and 21, are in the profile."""
_WIDTHS: Final = {24: 1, 25: 2, 26: 4, 27: 8}
_SMALLEST: Final = {24: 24, 25: 1 << 8, 26: 1 << 16, 27: 1 << 32}
"""Below these a shorter head exists."""


def encode(value: object) -> bytes:
    """The one encoding of ``value``: ints, bytes, text, lists or tuples, dicts with text keys, booleans.

    Raises:
        MalformedError: a value outside the profile, or nested deeper than it allows.
    """
    _check_value(value, 0)
    return bytes(cbor2.dumps(value, canonical=True))


def decode(data: BytesLike, *, max_bytes: int, what: str) -> Any:
    """The value that ``data`` encodes; arrays become lists.

    Args:
        data: exactly one encoded value.
        max_bytes: more than this is refused unread.
        what: what the bytes should be, for messages.

    Raises:
        MalformedError: too long, or not the one encoding of a value of the profile.
    """
    received = _bounded(data, max_bytes, what)
    value = _loads(received, what)
    _compare(cbor2.dumps(value, canonical=True), received, what, "its own canonical form")
    return value


def decode_as(type_: type[_T], data: BytesLike, *, max_bytes: int, what: str) -> _T:
    """A typed value: :func:`decode`, then the schema, then a comparison with the typed value's own encoding.

    The comparison refuses fields that ``type_`` does not know and fields left to their defaults: a value has one
    encoding. ``type_`` is a msgspec struct, a union of tagged ones, or anything msgspec converts to.

    Raises:
        MalformedError: as for :func:`decode`, or bytes that do not fit the schema.
    """
    received = _bounded(data, max_bytes, what)
    typed = from_value(type_, _loads(received, what), what=what)
    _compare(encode_struct(typed), received, what, "exactly the fields of its schema")
    return typed


def from_value(type_: type[_T], value: object, *, what: str) -> _T:
    """A decoded value converted to ``type_``, strictly: no text for a number, no number for a boolean.

    Raises:
        MalformedError: it does not fit the schema; the message says where.
    """
    try:
        return msgspec.convert(value, type_, strict=True)
    except msgspec.ValidationError as error:
        raise MalformedError(f"{what}: {str(error)[:300]}") from error


def encode_struct(struct: object) -> bytes:
    """The one encoding of a msgspec struct: a map of its fields, or an array for ``array_like`` ones.

    Raises:
        MalformedError: a value outside the profile.
    """
    return encode(msgspec.to_builtins(struct, builtin_types=(bytes,)))


def _bounded(data: BytesLike, max_bytes: int, what: str) -> bytes:
    if len(data) > max_bytes:
        raise MalformedError(f"{what}: expected at most {max_bytes} bytes, found {len(data)}")
    return bytes(data)


def _loads(data: bytes, what: str) -> Any:
    _Scan(data, what).run()
    try:
        return cbor2.loads(data, max_depth=MAX_CBOR_DEPTH + 1, allow_indefinite=False, allow_duplicate_keys=False)
    except cbor2.CBORDecodeError as error:  # pragma: no cover - the scan leaves nothing to refuse
        raise MalformedError(f"{what}: not CBOR") from error


def _compare(encoded: bytes, received: bytes, what: str, expected: str) -> None:
    if encoded != received:
        raise MalformedError(f"{what}: expected {expected}; re-encoding it gives {len(encoded)} other bytes")


class _Frame:
    """An array or map that is being scanned."""

    __slots__ = ("is_map", "last_key", "left")

    def __init__(self, left: int, is_map: bool) -> None:
        self.left = left
        self.is_map = is_map
        self.last_key = b""


class _Scan:
    """One flat pass over the structure, without recursion and without building a value."""

    __slots__ = ("_at", "_data", "_frames", "_what")

    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._what = what
        self._at = 0
        self._frames: list[_Frame] = []

    def run(self) -> None:
        """Walks exactly one item and everything in it.

        Raises:
            MalformedError: anything outside the profile.
        """
        data, frames = self._data, self._frames
        self._item()
        while frames:
            frame = frames[-1]
            if frame.left == 0:
                frames.pop()
                continue
            at_key = frame.is_map and frame.left % 2 == 0
            frame.left -= 1
            start = self._at
            if at_key and (start >= len(data) or data[start] >> 5 != _TEXT):
                raise self._refuse("a map key that is not text")
            self._item()
            if at_key:
                self._check_key_order(frame, data[start : self._at])
        if self._at != len(data):
            raise self._refuse("bytes after the value")

    def _item(self) -> None:
        major, argument = self._head()
        if major in (_BYTES, _TEXT):
            start = self._at
            self._at = start + argument
            if self._at > len(self._data):
                raise self._refuse("fewer bytes than declared")
            if major == _TEXT:
                self._check_text(self._data[start : self._at])
        elif major in (_ARRAY, _MAP):
            left = argument * (major - _ARRAY + 1)
            # Every item takes a byte: a count that cannot be met is refused before anything believes it.
            if left > len(self._data) - self._at:
                raise self._refuse("fewer items than declared")
            if len(self._frames) == MAX_CBOR_DEPTH:
                raise self._refuse(f"more than {MAX_CBOR_DEPTH} levels of nesting")
            self._frames.append(_Frame(left, major == _MAP))

    def _head(self) -> tuple[int, int]:
        """Major type and argument of the next item."""
        data, at = self._data, self._at
        if at >= len(data):
            raise self._refuse("an end in the middle of the value")
        major, short = data[at] >> 5, data[at] & 31
        if major in (_NEGATIVE, _TAG):
            raise self._refuse("a negative integer" if major == _NEGATIVE else "a tag")
        if major == _SIMPLE:
            self._check_simple(short)
        self._at = at + 1
        if short < 24 or major == _SIMPLE:
            return major, short
        width = _WIDTHS.get(short)
        if width is None:
            raise self._refuse("an indefinite or reserved length")
        self._at += width
        argument = int.from_bytes(data[at + 1 : self._at], "big")
        if self._at > len(data):
            raise self._refuse("an end in the middle of the value")
        if argument < _SMALLEST[short]:
            raise self._refuse("a number or length in more bytes than needed")
        if argument > MAX_CBOR_INT:
            raise self._refuse("a number of 2^63 or more")
        return major, argument

    def _check_simple(self, short: int) -> None:
        if refused := _SIMPLE_VALUES.get(short, "a simple value"):
            raise self._refuse(refused)

    def _check_text(self, raw: bytes) -> None:
        if raw.isascii():
            return
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._refuse("text that is not UTF-8") from error
        if not unicodedata.is_normalized("NFC", text):
            raise self._refuse("text that is not in normal form C")

    def _check_key_order(self, frame: _Frame, key: bytes) -> None:
        # An encoded key is at least one byte long: the empty start is below all of them.
        if key == frame.last_key:
            raise self._refuse("a map key twice")
        if key < frame.last_key:
            raise self._refuse("map keys out of order")
        frame.last_key = key

    def _refuse(self, found: str) -> MalformedError:
        return MalformedError(f"{self._what}: expected the strict CBOR profile, found {found} at byte {self._at}")


def _check_value(value: object, depth: int) -> None:
    if isinstance(value, bool | bytes):
        return
    if isinstance(value, int):
        if not 0 <= value <= MAX_CBOR_INT:
            raise MalformedError(f"expected an integer from 0 to 2^63 - 1, found {value}")
    elif isinstance(value, str):
        _check_writable(value)
    elif isinstance(value, list | tuple | dict):
        if depth == MAX_CBOR_DEPTH:
            raise MalformedError(f"expected at most {MAX_CBOR_DEPTH} levels of nesting")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise MalformedError(f"expected map keys of text, found {type(key).__name__}")
                _check_writable(key)
            value = list(value.values())
        for item in value:
            _check_value(item, depth + 1)
    else:
        raise MalformedError(f"expected a value of the strict CBOR profile, found {type(value).__name__}")


def _check_writable(text: str) -> None:
    # A lone surrogate is no Unicode text; is_normalized lets it pass.
    if not text.isascii() and (
        not unicodedata.is_normalized("NFC", text) or any("\ud800" <= character <= "\udfff" for character in text)
    ):
        raise MalformedError("expected Unicode text in normal form C")
