"""A request as it may come next: the same, with what probably varies before its conversation set to other values."""

import json
from collections.abc import Mapping
from typing import Any

from kvnet_node.prompts.outline import Path, outline, replaced
from kvnet_node.prompts.spans import varied


def another_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with other dates, names, ids and counters in tools and system prompt; it is not changed itself."""
    texts: dict[Path, str] = {}
    for part in outline(body).head:
        for piece in part.pieces:
            text = varied(piece.text)
            if text != piece.text and (not piece.is_json or _is_json(text)):
                texts[piece.path] = text
    return replaced(body, texts)


def _is_json(text: str) -> bool:
    # An escape sequence inside what varies may have become one that there is not.
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
