"""Sessions of Codex: ``~/.codex/sessions/**/rollout-*.jsonl``, one typed item a line.

Items the model made stand before the ``token_count`` of the request that made them; the prompt of that request is
everything before the first of them. A ``token_count`` may be written again with nothing new in it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvnet_node.audit.auditor import Sent
from kvnet_node.audit.bodies import message_part
from kvnet_node.audit.fields import count, record, text, timestamp_s
from kvnet_node.audit.prompt import Step, extend, root

AGENT = "codex"

_TYPES = frozenset({"session_meta", "response_item", "event_msg", "turn_context", "compacted"})
_INPUTS = ("_output", "user", "developer", "system")


def is_log(value: dict[str, Any]) -> bool:
    """Whether a line is of such a session."""
    return text(value, "type") in _TYPES and isinstance(value.get("payload"), dict)


def requests(path: Path, lines: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[Sent]:
    """The requests of one file."""
    reader = _Reader(path)
    for _, value in lines:
        if (sent := reader.line(value)) is not None:
            yield sent


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._session = path.stem
        self._version = self._project = self._model = ""
        self._begun = 0
        self._prompt = self._begin()
        self._asked: Step | None = None
        self._compacted = False
        self._total: Any = None

    def _begin(self) -> Step:
        self._begun += 1
        return root(AGENT, str(self._path), str(self._begun))

    def line(self, value: dict[str, Any]) -> Sent | None:
        payload = record(value, "payload")
        kind = text(value, "type")
        if kind == "session_meta":
            self._session = text(payload, "id") or self._session
            self._version, self._project = text(payload, "cli_version"), text(payload, "cwd")
        elif kind == "turn_context":
            self._model = text(payload, "model") or self._model
        elif kind == "response_item":
            self._item(payload)
        elif kind == "compacted":
            self._prompt, self._asked, self._compacted = self._begin(), None, True
        elif kind == "event_msg" and payload.get("type") == "token_count":
            return self._request(record(payload, "info"), value.get("timestamp"))
        return None

    def _item(self, item: dict[str, Any]) -> None:
        kind = text(item, "type")
        made = not (kind.endswith(_INPUTS) or text(item, "role") in _INPUTS)
        if made and self._asked is None:
            self._asked = self._prompt
        said = {"role": text(item, "role") or kind, "content": item.get("content"), **_rest(item)}
        self._prompt = extend(self._prompt, message_part(said))

    def _request(self, info: dict[str, Any], timestamp: Any) -> Sent | None:
        usage, total = record(info, "last_token_usage"), info.get("total_token_usage")
        tokens = count(usage, "input_tokens")
        if not tokens or (total is not None and total == self._total):
            return None
        self._total = total
        prompt, self._asked = self._asked or self._prompt, None
        compacted, self._compacted = self._compacted, False
        return Sent(
            agent=AGENT,
            session=self._session,
            model=self._model,
            prompt=prompt,
            tokens=tokens,
            cached=count(usage, "cached_input_tokens"),
            at_s=timestamp_s(timestamp),
            hidden=True,
            head=(AGENT, self._version, self._model, self._project),
            compacted=compacted,
        )


def _rest(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in {"type", "role", "content", "id", "status"}}
