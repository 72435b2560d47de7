"""The completion endpoint inside the engine process: mlx-lm's own request handler over frames instead of a socket.

Validation, response bodies, tool calls and server-sent events are mlx-lm's. The handler reads the body from memory and
writes to frames, so that there is no port or path that somebody besides the node could open. What it writes before the
answer's body, status and content type, becomes the event that starts the answer.
"""

import io
import json
import threading
from collections.abc import Callable
from typing import Any

from mlx_lm.server import APIHandler, get_system_fingerprint

from kvnet.engine.completions import CompletionRequest
from kvnet.engine.mlx import parameters
from kvnet.engine.mlx.json_schema import JsonGrammars
from kvnet.engine.mlx.logprobs import ToldTokens, chat_logprobs, text_logprobs
from kvnet.engine.mlx.requests import CancelledRequestError, Request, microseconds
from kvnet.engine.mlx.responses import NotStartedError, Responses, Submit
from kvnet.engine.prompts import PromptKind
from kvnet.engine.wire import BodyEvent, CompletedEvent, Record, StartedEvent
from kvnet.engine.wire_values import error_event
from kvnet.errors import BusyError
from kvnet.format.prefix import tokens_to_bytes

MAX_REQUESTS = 64
"""Completions at a time; each has a thread that mostly waits."""

PATHS = {PromptKind.CHAT: "/v1/chat/completions", PromptKind.TEXT: "/v1/completions"}
"""What mlx-lm's handler is told that it is asked for."""


class Endpoint:
    """Answers completions for a loaded model.

    Args:
        tokenizer: mlx-lm's wrapper.
        window_tokens: the model's window; 0 when unknown.
        submit: where prompts go.
    """

    def __init__(self, tokenizer: Any, window_tokens: int, submit: Submit) -> None:
        self._tokenizer = tokenizer
        self._window_tokens = window_tokens
        self._submit = submit
        self._grammars = JsonGrammars(tokenizer)
        self._fingerprint = get_system_fingerprint()
        self._places = threading.Semaphore(MAX_REQUESTS)

    def answer(self, request: Request, asked: CompletionRequest) -> None:
        """Answers in a thread of the request's own; returns at once.

        Raises:
            BusyError: too many are being answered.
        """
        if not self._places.acquire(blocking=False):
            raise BusyError(
                f"{MAX_REQUESTS} completions run already, as many as an engine takes", hint="try again in a moment"
            )
        threading.Thread(target=self._run, args=(request, asked), name="completion", daemon=True).start()

    def _run(self, request: Request, asked: CompletionRequest) -> None:
        try:
            self._answer(request, asked)
        except CancelledRequestError:
            pass
        except NotStartedError as stop:
            if not isinstance(stop.error, CancelledRequestError):
                request.send(error_event(request.id, stop.error))
        except Exception as error:  # noqa: BLE001 - one request fails, the engine lives on
            request.send(error_event(request.id, error))
        finally:
            self._places.release()

    def _answer(self, request: Request, asked: CompletionRequest) -> None:
        responses = Responses(request, asked, self._tokenizer, self._grammars, self._submit)
        handler = Handler(
            request,
            asked,
            responses,
            system_fingerprint=self._fingerprint,
            window_tokens=self._window_tokens,
            grammar_of=self._grammars.grammar_of,
            tokenizer=self._tokenizer,
        )
        handler.do_POST()
        request.send(_completed(request, responses, handler.finish_reason))


class Handler(APIHandler):
    """mlx-lm's handler for one request of the node.

    Args:
        request: who asked.
        asked: what for.
        responses: the answer.
        system_fingerprint: as mlx-lm's server tells it.
        window_tokens: the model's window; 0 when unknown.
        grammar_of: checks ``response_format``.
        tokenizer: mlx-lm's wrapper.
    """

    def __init__(
        self,
        request: Request,
        asked: CompletionRequest,
        responses: Responses,
        *,
        system_fingerprint: str,
        window_tokens: int,
        grammar_of: Callable[[Any], str | None],
        tokenizer: Any,
    ) -> None:
        # Not the base's: it would read a request from a socket.
        self._request = request
        self._asked = asked
        self._window_tokens = window_tokens
        self._grammar_of = grammar_of
        self._tokenizer = tokenizer
        self._status = 0
        self._content_type = ""
        self.finish_reason = ""
        # The attributes of the base are typed for sockets; only reading, writing and ``get`` are used of them.
        self._responses = responses
        self.response_generator: Any = responses
        self.system_fingerprint = system_fingerprint
        self.created = parameters.now()
        self.path = PATHS[asked.kind]
        self.body: dict[str, Any] = {}
        self.rfile: Any = io.BytesIO()
        self.headers: Any = {}
        self.wfile: Any = _Frames(request, self._as_sent)

    def do_POST(self) -> None:  # noqa: N802 - the base's name
        """Answers the request; see ``APIHandler.do_POST``."""
        try:
            raw = parameters.handler_body(self._asked.body)
        except ValueError as error:
            self._refuse(str(error))
            return
        self.rfile = io.BytesIO(raw)
        self.headers = {"Content-Length": str(len(raw))}
        super().do_POST()

    def _refuse(self, message: str) -> None:
        self._set_completion_headers(400)
        self.wfile.write(json.dumps({"error": message}).encode())

    def validate_model_parameters(self) -> None:
        """mlx-lm's checks, then those of what it does not know or would choke on later."""
        parameters.check_types(self.body)
        super().validate_model_parameters()
        parameters.check(self.body, vocabulary_size=len(self._tokenizer))
        self._responses.grammar = self._grammar_of(self.body.get("response_format"))

    def generate_response(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """See ``APIHandler.generate_response``; with kvnet's part of ``usage``."""
        response: dict[str, Any] = super().generate_response(*arguments, **named)
        choice = response["choices"][0]
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        if choice["finish_reason"] == "stop" and (met := self._responses.met_stop()) is not None:
            # Not in OpenAI's interface, which does not tell; other servers name it so.
            choice["stop_reason"] = met
        if "logprobs" in choice:
            # None of them in mlx-lm's form is what OpenAI's clients read.
            told = ToldTokens(
                named.get("tokens") or (), named.get("token_logprobs") or (), named.get("top_tokens") or ()
            )
            in_form = chat_logprobs if self._asked.kind is PromptKind.CHAT else text_logprobs
            choice["logprobs"] = in_form(told, self._tokenizer)
        if "usage" in response:
            self._add_usage(response["usage"])
        return response

    def completion_usage_response(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """See ``APIHandler.completion_usage_response``; with kvnet's part of ``usage``."""
        response: dict[str, Any] = super().completion_usage_response(*arguments, **named)
        response["object"] = self.object_type
        self._add_usage(response["usage"])
        return response

    def _add_usage(self, usage: dict[str, Any]) -> None:
        reused = self._responses.reused
        cached = usage["cache_read_input_tokens"] = reused.live_tokens + reused.restored_tokens
        # It was estimated before it was known what a live cache holds by now; no token counts as both.
        usage["cache_creation_input_tokens"] = min(self._asked.created_tokens, usage["prompt_tokens"] - cached)
        if self._window_tokens:
            left = max(0, self._window_tokens - usage["total_tokens"])
            usage["kvnet"] = {"window_tokens": self._window_tokens, "tokens_left": left}

    # What the base writes as HTTP; here it is the event that starts the answer.

    def send_response(self, code: int, message: str | None = None) -> None:  # noqa: ARG002 - the base's parameters
        """Notes the status."""
        self._status = code

    def send_header(self, keyword: str, value: str) -> None:
        """Notes the content type; the others are the node's business."""
        if keyword.lower() == "content-type":
            self._content_type = value

    def end_headers(self) -> None:
        """Nothing: the answer has started when its headers were named."""

    def _set_cors_headers(self) -> None:
        """Starts the answer: mlx-lm calls this once status and content type are set."""
        reused = self._responses.reused
        self._request.send(
            StartedEvent(
                self._request.id,
                self._status,
                self._content_type,
                reused.live_tokens,
                reused.restored_tokens,
                microseconds(reused.restore_s),
            )
        )

    def _as_sent(self, data: bytes) -> bytes:
        return data if self._status < 400 else parameters.error_body(data)


class _Frames(io.RawIOBase):
    """A file whose writes are events."""

    def __init__(self, request: Request, as_sent: Callable[[bytes], bytes]) -> None:
        self._request = request
        self._as_sent = as_sent

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._request.raise_if_cancelled()
        self._request.send(BodyEvent(self._request.id, self._as_sent(bytes(data))))
        return len(data)


def _completed(request: Request, responses: Responses, finish_reason: str) -> Record:
    generation = responses.generation
    if generation is None:
        return CompletedEvent(request.id, b"", "", 0, 0, 0, 0, 0)
    first_s = request.accepted_s + generation.ttft_s
    return CompletedEvent(
        id=request.id,
        tokens=tokens_to_bytes(generation.made),
        finish_reason=finish_reason,
        held_tokens=generation.held_tokens,
        ttft_us=microseconds(generation.ttft_s),
        prefilled_tokens=len(generation.tokens) - generation.restored_tokens,
        prefill_us=microseconds(generation.prefill_s),
        decode_us=microseconds(generation.ended_s - first_s),
    )
