"""Who answers which request of a peer."""

from kvnet.exchange.session import Answer, PeerSession
from kvnet.protocol.messages.control import ArtifactRequest, BulkRequest, MemberRequest, Reply, Request
from kvnet.protocol.messages.refusals import RefusalReason, Refused


class Answerers:
    """Hands each request to whoever answers its kind.

    Args:
        answer_artifacts: answers requests for artifacts and bulk connections.
    """

    def __init__(self, answer_artifacts: Answer) -> None:
        self._answer_artifacts = answer_artifacts
        self._by_kind: dict[type[Request], Answer] = {}
        self._answer_former: Answer = _refuse_unknown

    def add(self, kind: type[Request], answerer: Answer) -> None:
        """Say who answers requests of this kind."""
        self._by_kind[kind] = answerer

    def add_former(self, answerer: Answer) -> None:
        """Say who answers requests of members that name a lookup secret that was replaced; nobody else sees them."""
        self._answer_former = answerer

    def answer(self, session: PeerSession, request: Request) -> Reply | None:
        """The reply to a request; None: it comes later, by `PeerSession.reply`."""
        if isinstance(request, ArtifactRequest | BulkRequest):
            return self._answer_artifacts(session, request)
        if isinstance(request, MemberRequest):
            proved = session.opened.namespaces.get(request.slot)
            if proved is not None and proved.former:
                return self._answer_former(session, request)
        answerer = self._by_kind.get(type(request))
        if answerer is None:
            return Refused(request_id=request.request_id, reason=RefusalReason.NOT_SERVING)
        return answerer(session, request)


def _refuse_unknown(_session: PeerSession, request: Request) -> Reply:
    return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)
