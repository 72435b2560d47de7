"""Structured logs of the running node: to its log file, and to stderr with ``--verbose``.

Never in a log: prompts, tokens, text, full prefix keys, secrets. Values that came from a peer are escaped.
"""

import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import structlog

from kvnet_node.output import escape

MAX_LOG_BYTES = 10_000_000
"""A log that has grown past this is set aside once, under ``.1``, when the node starts."""

_SECRET_NAMES = frozenset({"prompt", "text", "tokens", "messages", "question", "secret", "seed"})


def configure_logs(log_file: Path | None, *, verbose: bool) -> None:
    """Send log records to a file (0600) and, when asked, to stderr; never to stdout, which holds results."""
    handlers: list[logging.Handler] = []
    if log_file is not None:
        handlers.append(_file_handler(log_file))
    if verbose:
        handlers.append(logging.StreamHandler(sys.stderr))
    if not handlers:
        # Without any handler Python writes warnings to stderr by itself.
        handlers.append(logging.NullHandler())
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_log_level, structlog.stdlib.add_logger_name],
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            drop_secrets,
            escape_values,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
    )
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    # libp2p logs every dial and stream at its own levels; only its warnings say something about this node.
    logging.getLogger("libp2p").setLevel(logging.WARNING if verbose else logging.ERROR)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _file_handler(log_file: Path) -> logging.Handler:
    if log_file.exists() and log_file.stat().st_size > MAX_LOG_BYTES:
        log_file.replace(log_file.with_suffix(log_file.suffix + ".1"))
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return logging.StreamHandler(os.fdopen(descriptor, "a", encoding="utf-8"))


def drop_secrets(_logger: Any, _method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace values under names that could hold what a person wrote."""
    for name in _SECRET_NAMES & record.keys():
        record[name] = "(not logged)"
    return record


def escape_values(_logger: Any, _method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape every text, so that no value can forge a line or move a cursor."""
    for name, value in record.items():
        if isinstance(value, str) and name != "exception":
            record[name] = escape(value)
    return record
