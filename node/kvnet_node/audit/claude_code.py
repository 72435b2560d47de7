"""Sessions of Claude Code: ``~/.claude/projects/**/*.jsonl``, one message a line, each naming the one before it.

An answer may be spread over several lines of one message id; its usage stands on each of them. The log shows neither
system prompt nor tools. Messages of a resumed session are written again into its new file.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvnet_node.audit.auditor import Sent
from kvnet_node.audit.bodies import message_part
from kvnet_node.audit.fields import count, text, timestamp_s
from kvnet_node.audit.prompt import Step, extend, root

AGENT = "claude-code"


def is_log(value: dict[str, Any]) -> bool:
    """Whether a line is of such a session."""
    if value.get("type") == "summary":
        return "leafUuid" in value
    if value.get("type") == "file-history-snapshot":
        return "messageId" in value
    return "sessionId" in value and ("uuid" in value or "message" in value or "operation" in value)


def requests(path: Path, lines: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[Sent]:
    """The requests of one file."""
    reader = _Reader(path)
    for _, value in lines:
        if (sent := reader.line(value)) is not None:
            yield sent


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._prompts: dict[str, Step] = {}
        self._compacted = False
        self._answers: set[str] = set()

    def line(self, value: dict[str, Any]) -> Sent | None:
        uuid, parent = text(value, "uuid"), text(value, "parentUuid")
        if not uuid:
            return None
        before = self._prompts.get(parent) or root(AGENT, str(self._path), uuid)
        message = value.get("message")
        if text(value, "type") not in {"user", "assistant"} or not isinstance(message, dict):
            # Progress, attachments and remarks stand in the chain of messages and are no messages.
            self._prompts[uuid] = before
            return None
        sent = self._request(value, message, before) if value["type"] == "assistant" else None
        self._prompts[uuid] = extend(before, message_part(_said(message)))
        if value.get("isCompactSummary"):
            self._compacted = True
        return sent

    def _request(self, value: dict[str, Any], message: dict[str, Any], before: Step) -> Sent | None:
        key = f"{text(message, 'id')}/{text(value, 'requestId')}"
        usage = message.get("usage")
        if key in self._answers or not isinstance(usage, dict) or value.get("isApiErrorMessage"):
            return None
        model = text(message, "model")
        if model == "<synthetic>":
            return None
        self._answers.add(key)
        compacted, self._compacted = self._compacted, False
        read = count(usage, "cache_read_input_tokens") or 0
        tokens = (count(usage, "input_tokens") or 0) + (count(usage, "cache_creation_input_tokens") or 0) + read
        return Sent(
            agent=AGENT,
            session=_session(value, self._path),
            model=model,
            prompt=before,
            tokens=tokens,
            cached=read,
            at_s=timestamp_s(value.get("timestamp")),
            hidden=True,
            head=(
                AGENT, text(value, "version"), model, text(value, "cwd"), "side" if value.get("isSidechain") else "",
            ),
            compacted=compacted,
            key=key if len(key) > 1 else "",
        )  # fmt: skip


def _said(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": message.get("role", ""), "content": message.get("content")}


def _session(value: dict[str, Any], path: Path) -> str:
    session = text(value, "sessionId") or path.stem
    agent = text(value, "agentId")
    return f"{session}/{agent}" if agent else session
