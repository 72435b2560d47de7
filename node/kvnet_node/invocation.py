"""One run of the command line: its flags, its output, and the way from a verb to an operation."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from kvnet.errors import UsageError
from kvnet_node.arguments import GlobalFlags
from kvnet_node.events import Event
from kvnet_node.output import Output
from kvnet_node.paths import DataPaths, default_data_dir, is_writable, not_writable, prepare_data_dir

if TYPE_CHECKING:
    from kvnet_node.config import Config
    from kvnet_node.operations.requests import Request, Result

R = TypeVar("R", bound="Result")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where a node keeps its files, and how it is set up."""

    paths: DataPaths
    config: "Config"
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class Invocation:
    """What a command function is given beside its own arguments."""

    flags: GlobalFlags
    output: Output

    @property
    def data_dir(self) -> Path:
        """The data directory, absolute; it may not exist yet."""
        return Path(os.path.abspath((self.flags.data_dir or default_data_dir()).expanduser()))

    def config(self, **flags: Any) -> "Config":
        """The resolved settings, without touching the data directory. Flags are dotted keys with ``_`` for the dot."""
        from kvnet_node.config import load_config

        return load_config(self.data_dir, flags=_dotted(flags))

    def settings(self, **flags: Any) -> Settings:
        """The resolved settings; the data directory is created when missing.

        Raises:
            ConfigError: the data directory cannot be created or written.
        """
        settings = self._settings(**flags)
        if not is_writable(self.data_dir):
            raise not_writable(self.data_dir)
        return settings

    def _settings(self, **flags: Any) -> Settings:
        paths = prepare_data_dir(self.data_dir)
        return Settings(paths, self.config(**flags), verbose=self.output.verbose)

    def run(
        self,
        name: str,
        request: "Request",
        kind: type[R],
        *,
        on_event: Callable[[Event], None] | None = None,
        **flags: Any,
    ) -> R:
        """Run an operation in the running node, or here when none runs, showing what it reports.

        Args:
            name: the operation.
            request: its request.
            kind: the type of its result.
            on_event: takes what the operation reports; by default it is shown.
            flags: settings given on the command line, as in ``settings``; they hold for a local run only.
        """
        from kvnet_node.dispatch import run_operation

        # With --json what is printed is read by a program, which has no use for it.
        say = None if self.output.json else self.output.message
        result = run_operation(self._settings(**flags), name, request, on_event or self.output.event, say)
        if not isinstance(result, kind):
            raise TypeError(f"operation {name} gave {type(result).__name__}, expected {kind.__name__}")
        return result


Context = Annotated[Invocation, Parameter(parse=False)]
"""The type of the keyword-only parameter through which a command function gets its invocation."""


def _dotted(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", ".", 1): value for name, value in flags.items()}


def absolute(path: Path) -> Path:
    """An absolute path that still goes through symbolic links as written."""
    return Path(os.path.abspath(path.expanduser()))


def chosen_model(context: Invocation, model: str | None) -> str | None:
    """The model to name in a request: folders become absolute; a default set for this command alone is named too.

    A running node has its own configuration; what this command's environment says must win over it.
    """
    if model is None:
        config = context.config()
        model = config.model_default if config.origins["model.default"] == "environment" else None
    if model and ("/" in model or model in {".", ".."} or Path(model).is_dir()) and Path(model).expanduser().exists():
        return str(absolute(Path(model)))
    return model or None


def positive(name: str, value: int) -> int:
    """The value, when it is at least 1.

    Raises:
        UsageError: it is not.
    """
    if value < 1:
        raise UsageError(f"{name} expects a number from 1 on, found {value}")
    return value
