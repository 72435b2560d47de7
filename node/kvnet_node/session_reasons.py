"""Why a session with a connected peer did not open, told apart as far as it goes."""

from kvnet.errors import KvnetError, PeerRefusedError, UnsupportedVersionError
from kvnet.network.interface import StreamKind


def explain_no_session(error: KvnetError | None) -> tuple[str, str]:
    """Outcome and detail of a session that did not open: ``version``, ``not_kvnet`` or ``no_session``, and words."""
    if isinstance(error, UnsupportedVersionError):
        return "version", str(error)
    if isinstance(error, PeerRefusedError) and StreamKind.CONTROL.value in str(error):
        return "not_kvnet", str(error)
    return "no_session", str(error) if error is not None else "it did not open in time"
