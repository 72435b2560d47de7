"""Operations that compute: add, ask and generate."""

from contextlib import aclosing

from kvnet.engine.interface import PrefillProgress, TextDelta
from kvnet.exchange.generation import Answer, Generator
from kvnet.format.fingerprint import Verdict
from kvnet.format.hashes import artifact_text
from kvnet.trust.keys import publisher_text
from kvnet_node import events
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext


async def generate(context: OperationContext, request: r.GenerateRequest) -> r.GenerateResult:
    """Generate from a prompt or a chat."""
    services = context.services
    messages = request.messages or [{"role": "user", "content": request.prompt or ""}]
    async with services.engines.use(request.model) as engine:
        tokens = await engine.render(messages, {})
        generator = services.generator(engine, reuse=not request.no_reuse)
        answer = await _stream(context, generator, engine, tokens, request.max_tokens, reuse=not request.no_reuse)
        return _result(r.GenerateResult, answer, engine.info.name)
