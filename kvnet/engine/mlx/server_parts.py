"""Every part of mlx-lm's server that kvnet builds on, in one place, and a check that this version has them.

mlx-lm does not promise them to anybody. A version that lacks one is refused when the engine starts, with the name;
``tests/mlx/test_server_parts.py`` holds what is expected of each.
"""

import importlib
import logging
from importlib.metadata import version
from types import ModuleType
from typing import Any

from kvnet.errors import EngineError

NAMES: dict[str, tuple[str, ...]] = {
    "mlx_lm.server": (
        "APIHandler",
        "CompletionRequest",
        "GenerationArguments",
        "GenerationContext",
        "_make_logits_processors",
        "_make_sampler",
        "convert_chat",
        "get_system_fingerprint",
        "process_message_content",
    ),
    "mlx_lm.generate": (
        "GenerationBatch",
        "StopSequences",
        "TextStateMachine",
        "make_stop_sequences",
        "make_text_state_machine",
    ),
    "mlx_lm.sample_utils": ("apply_min_p", "apply_top_k", "apply_top_p"),
}
"""What is used, by module."""

HANDLER_METHODS = (
    "_set_completion_headers",
    "_set_cors_headers",
    "_set_stream_headers",
    "completion_usage_response",
    "do_POST",
    "generate_response",
    "handle_chat_completions",
    "handle_completion",
    "handle_text_completions",
    "validate_model_parameters",
)
"""Methods of ``APIHandler`` that are called or replaced."""


def check_parts(modules: dict[str, ModuleType]) -> None:
    """Checks that every part is there.

    Raises:
        EngineError: one is missing; says which, and which version of mlx-lm was found.
    """
    missing = [f"{module}.{name}" for module, names in NAMES.items() for name in names if _lacks(modules[module], name)]
    handler = getattr(modules["mlx_lm.server"], "APIHandler", object)
    missing += [f"mlx_lm.server.APIHandler.{name}" for name in HANDLER_METHODS if _lacks(handler, name)]
    if missing:
        raise EngineError(
            f"mlx-lm {version('mlx-lm')} lacks {', '.join(missing)}, which kvnet's endpoint is built on",
            hint="install the mlx-lm that kvnet was tested with: pip install 'mlx-lm==0.32.*'",
        )


def _lacks(owner: Any, name: str) -> bool:
    return not hasattr(owner, name)


def import_parts() -> None:
    """Imports mlx-lm's server and checks it.

    Raises:
        EngineError: as ``check_parts``.
    """
    # By name: the package's attribute ``generate`` is its function.
    check_parts({module: importlib.import_module(module) for module in NAMES})
    # The handler logs bodies it cannot parse and answers it cannot read; what people write is never logged here.
    # Without a handler of the root logger, warnings would go to stderr.
    logging.getLogger().addHandler(logging.NullHandler())
