"""The last requests, in RAM and bounded."""

from kvnet.engine.completions import Completed
from kvnet.engine.prompts import PreparedPrompt, PromptKind
from kvnet.exchange.answers import Asked, Finished, Reuse
from kvnet_node.api.requests_log import LoggedRequest, RequestLog

PROMPT = PreparedPrompt((1, 2, 3), (), 3, 0)
REUSE = Reuse(3, 0, 0, "none", (), 0.0, 0.0, 0.0, 0, None, (), (), PROMPT)
COMPLETED = Completed((7, 8), "stop", 5, 0.1, 3, 0.1, 0.1)


def run(log: RequestLog, body: bytes = b"{}", *, private: bool = False) -> LoggedRequest:
    request = log.begin(time_s=1.0, path="/v1/chat/completions", model="m")
    log.run(request, Asked(PromptKind.CHAT, body, {}, 8, private=private), ())
    log.reused(request, REUSE)
    log.finish(request, Finished(COMPLETED, REUSE, 0.1, 0.2))
    return request


def test_only_the_newest_are_kept() -> None:
    log = RequestLog(max_requests=2)
    ids = [run(log).id for _ in range(3)]
    assert [request.id for request in log] == ids[1:]
    assert log.find(ids[0]) is None
    assert log.find(ids[1][:-2]) is log.find(ids[1])
    assert log.find("") is None
    assert log.find("req-") is None
    newest = log.last()
    assert newest is not None
    assert newest.id == ids[2]


def test_an_older_request_keeps_its_figures_when_bodies_grow_too_large() -> None:
    log = RequestLog(max_bytes=1000)
    first, second = run(log, b"x" * 600), run(log, b"y" * 600)
    assert (first.asked, first.prepared) == (None, None)
    assert first.reuse is not None
    assert second.asked is not None
    assert second.prepared == PROMPT
    third = run(log, b"z" * 2000)
    assert third.asked is None


def test_of_a_private_request_neither_text_nor_tokens_are_kept() -> None:
    request = run(RequestLog(), b"secret", private=True)
    assert (request.asked, request.prepared, request.private) == (None, None, True)
    assert request.finished is not None
    assert request.finished.completed.tokens == ()
    assert request.finished.reuse.prepared.tokens == ()
