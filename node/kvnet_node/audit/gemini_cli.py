"""Sessions of Gemini CLI: ``~/.gemini/tmp/*/chats/session-*.json``, one JSON object a session.

Each message of the model carries the tokens of the request that made it; ``input`` contains ``cached``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvnet_node.audit.auditor import Sent
from kvnet_node.audit.bodies import message_part
from kvnet_node.audit.fields import count, record, text, timestamp_s
from kvnet_node.audit.prompt import extend, root

AGENT = "gemini-cli"


def is_log(value: dict[str, Any]) -> bool:
    """Whether an object is such a session."""
    return "sessionId" in value and isinstance(value.get("messages"), list) and "startTime" in value


def requests(path: Path, session: dict[str, Any]) -> Iterator[Sent]:
    """The requests of one session."""
    name = text(session, "sessionId") or path.stem
    prompt = root(AGENT, str(path))
    for message in session["messages"]:
        if not isinstance(message, dict) or text(message, "type") not in {"user", "gemini"}:
            continue
        usage = record(message, "tokens")
        tokens = count(usage, "input")
        if message["type"] == "gemini" and tokens:
            yield Sent(
                agent=AGENT,
                session=name,
                model=text(message, "model"),
                prompt=prompt,
                tokens=tokens,
                cached=count(usage, "cached"),
                at_s=timestamp_s(message.get("timestamp")),
                hidden=True,
                head=(AGENT, text(message, "model"), text(session, "projectHash")),
                key=f"{name}/{text(message, 'id')}" if text(message, "id") else "",
            )
        role = "assistant" if message["type"] == "gemini" else "user"
        rest = {"tool_calls": message["toolCalls"]} if message.get("toolCalls") else {}
        prompt = extend(prompt, message_part({"role": role, "content": message.get("content"), **rest}))
