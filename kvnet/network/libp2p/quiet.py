"""py-libp2p logs a great deal, at high levels, and some of it on the root logger; what matters we log ourselves."""

import logging


class _DropLibP2P(logging.Filter):
    """Drops what py-libp2p writes straight to the root logger; a logger's filter sees only its own records."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "site-packages/libp2p/" not in record.pathname


_FILTER = _DropLibP2P()


def quieten() -> None:
    """Raise the levels of py-libp2p's loggers and drop what it logs on the root logger. May be called again."""
    for name in ["libp2p", *logging.root.manager.loggerDict]:
        if name == "libp2p" or name.startswith("libp2p."):  # some of its modules set a level of their own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    root = logging.getLogger()
    if _FILTER not in root.filters:
        root.addFilter(_FILTER)
