"""What an operation is given: the services of one data directory, and a way to report."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvnet_node.events import Event, Note, Progress

if TYPE_CHECKING:
    from kvnet_node.services import Services


@dataclass(frozen=True, slots=True)
class OperationContext:
    """The surroundings of one running operation.

    Attributes:
        services: the parts of the node for this data directory.
        emit: takes an event for the asker; never blocks. Progress may be thinned out, text and notes are not.
        serving: True in a running node, False in a verb's own short-lived process.
    """

    services: "Services"
    emit: Callable[[Event], None]
    serving: bool = False

    def progress(self, stage: str, done: int, total: int = 0, *, unit: str = "", text: str = "") -> None:
        """Report progress of one stage."""
        self.emit(Progress(stage, done, total, unit, text))

    def note(self, text: str, **data: object) -> None:
        """Report a remark, with the same as named values for ``--json``."""
        self.emit(Note(text, data=dict(data)))

    def loading(self, model: str) -> None:
        """Report that a model is being loaded."""
        self.note(f"loading the model {model}", model=model)

    def warn(self, text: str, **data: object) -> None:
        """Report something that the asker should know even when not asking for remarks."""
        self.emit(Note(text, level="warning", data=dict(data)))
