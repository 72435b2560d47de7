"""``docs/format.md`` and the code say the same."""

import re
from pathlib import Path
from typing import Any

import pytest

from kvnet.format import chunks, codecs, container, fingerprint, hashes, limits, manifest, tensor, ticket
from kvnet.trust import envelope
from scripts import regenerate_vectors as golden

DOCUMENT = (Path(__file__).parents[3] / "docs" / "format.md").read_text()
CDDL = "\n".join(re.findall(r"^```cddl\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL))


def rules() -> dict[str, str]:
    """CDDL rules by name, comments left out."""
    text = re.sub(r";[^\n]*", "", CDDL)
    found = re.findall(r"^([a-z][a-z-]*) = (.*?)(?=^[a-z][a-z-]* = |\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(found) == len(dict(found))
    return {name: body.strip() for name, body in found}


def members(rule: str) -> list[str]:
    """Names of the fields of a map or array rule, in order."""
    return re.findall(r"^  ([a-z_-]+|\d+):", rules()[rule], re.MULTILINE)


def between(marker: str) -> str:
    return DOCUMENT.split(f"<!-- {marker} -->")[1].split("<!-- end -->")[0]


STRUCTS: dict[str, Any] = {
    "fingerprint": fingerprint.Fingerprint,
    "adapter": fingerprint.Adapter,
    "layer-layout": fingerprint.LayerLayout,
    "layer-kind": tensor.LayerKind,
    "state-shape": tensor.StateShape,
    "kv-format": fingerprint.KvFormat,
    "manifest": manifest.Manifest,
    "producer": fingerprint.Producer,
    "derived-span": manifest.DerivedSpan,
}


@pytest.mark.parametrize("rule", sorted(STRUCTS))
def test_every_structure_has_the_fields_of_the_code(rule: str) -> None:
    assert members(rule) == list(STRUCTS[rule].__struct_fields__)
    # An array in the document is an array in the code.
    assert rules()[rule].startswith("[") == STRUCTS[rule].__struct_config__.array_like


def test_every_rule_is_defined_and_used() -> None:
    defined = rules()
    bodies = [re.sub(r'"[^"]*"', "", body) for body in defined.values()]
    used = {word for body in bodies for word in re.findall(r"(?<![\w\"-])([a-z][a-z-]*)(?![\w:\"-])", body)}
    builtin = {"bstr", "tstr", "uint", "size"}
    assert used - builtin <= set(defined)
    roots = {"manifest", "envelope", "protected-header", "weights-list"}
    assert set(defined) - roots <= used


def test_the_alternatives_are_those_of_the_code() -> None:
    def quoted(text: str) -> set[str]:
        return set(re.findall(r'"([^"]+)"', text))

    assert quoted(rules()["dtype"]) == {dtype.value for dtype in tensor.DType}
    (cache,) = re.findall(r"cache: (.*)", rules()["layer-kind"])
    assert quoted(cache) == set(tensor.CACHE_KINDS)
    (codec,) = re.findall(r"codec: (.*)", rules()["manifest"])
    assert quoted(codec) == {codec.value for codec in codecs.Codec}
    assert quoted(rules()["protected-header"]) == {envelope.StatementType.MANIFEST.content_type}
    assert f"`{envelope.StatementType.MANIFEST.external_aad.decode()}`" in DOCUMENT


def test_the_bounds_in_the_structures_are_the_limits() -> None:
    for field, bound in {
        "n_tokens": f"1..{limits.MAX_TOKENS}",
        "groups": f"[1*{limits.MAX_LAYERS} uint]",
        "n_chunks": f"1..{limits.MAX_CHUNKS}",
        "continuation": f"[0*{limits.MAX_CONTINUATION_TOKENS} token-id]",
        "derived_from": f"[0*{limits.MAX_DERIVED_SPANS} derived-span]",
        "context_size_bytes": f"0..{limits.MAX_CONTEXT_BYTES}",
        "adapters": f"[0*{limits.MAX_ADAPTERS} adapter]",
        "kinds": f"[1*{limits.MAX_LAYER_KINDS} layer-kind]",
        "order": f"bstr .size (1..{limits.MAX_LAYERS})",
        "heads": f"0..{limits.MAX_HEADS}",
        "k_dim": f"0..{limits.MAX_DIM}",
        "v_dim": f"0..{limits.MAX_DIM}",
        "window": f"0..{limits.MAX_WINDOW_TOKENS}",
        "states": f"[0*{limits.MAX_STATES} state-shape]",
        "shape": f"[1*{limits.MAX_STATE_RANK} 1..{limits.MAX_DIM}]",
        "block_tokens": "256",
        "version": f"{manifest.MANIFEST_VERSION}",
    }.items():
        assert re.search(rf"^  {field}: {re.escape(bound)},", CDDL, re.MULTILINE), field
    assert f"token-id = 0..{limits.MAX_TOKEN_ID}" in CDDL
    assert f"producer-text = tstr .size (0..{limits.MAX_PRODUCER_TEXT_BYTES})" in CDDL


def test_the_table_of_limits_is_the_code() -> None:
    table = dict(re.findall(r"^\| `([A-Z_]+)` \| ([\d,]+) \|", between("limits"), re.MULTILINE))
    found = {name: int(value.replace(",", "")) for name, value in table.items()}
    assert found == {name: getattr(limits, name) for name in dir(limits) if name.isupper()}


def test_the_fields_that_do_not_matter_are_those_of_the_code() -> None:
    assert set(re.findall(r"`([^`]+)`", between("irrelevant fields"))) == fingerprint.IRRELEVANT_CONFIG_FIELDS


def test_every_derivation_context_is_written_down() -> None:
    contexts = {name: getattr(hashes, name) for name in dir(hashes) if name.endswith("_CONTEXT")}
    assert len(contexts) >= 5
    for context in contexts.values():
        assert f'derive("{context}"' in DOCUMENT


def test_magic_numbers_and_sizes_of_the_container_are_written_down() -> None:
    assert f"`{container.MAGIC.hex(' ')}`" in DOCUMENT
    assert f"`{container.TRAILER_MAGIC.hex(' ')}`" in DOCUMENT
    for part, size in (
        ("header", container.HEADER_SIZE_BYTES),
        ("envelope", limits.ENVELOPE_AREA_BYTES),
        ("pages", limits.ENTRY_SIZE_BYTES),
        ("footer", container.PLACEMENT_SIZE_BYTES),
        ("trailer", container.TRAILER_SIZE_BYTES),
    ):
        assert re.search(rf"^\| {part} \| {size:,}( · [`\w ]+)? \|", DOCUMENT, re.MULTILINE), part
    assert f'"{ticket.SCHEME}"' in DOCUMENT


def test_every_golden_vector_is_named() -> None:
    protocol = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    for name in golden.all_vectors():
        assert f"`{name}`" in DOCUMENT or f"`{name}`" in protocol


def test_the_stored_size_bound_in_the_document_is_the_code() -> None:
    assert "`size + size / 256 + 1024`" in DOCUMENT
    for size in (0, 255, 256, 1 << 20):
        assert codecs.max_stored_bytes(codecs.Codec.SHUFFLE_ZSTD1, size) == size + size // 256 + 1024
    assert chunks.ABSENT.length_bytes == 0
