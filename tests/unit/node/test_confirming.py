"""What others notice is asked about at a terminal, and refused where nobody can be asked."""

import io
from pathlib import Path

import pytest

from kvnet.errors import UsageError
from kvnet_node.arguments import GlobalFlags
from kvnet_node.commands.artifacts import remove
from kvnet_node.commands.swarms import leave
from kvnet_node.confirming import confirm, require_terminal
from kvnet_node.invocation import Invocation
from kvnet_node.output import Output
from kvnet_node.paths import prepare_data_dir
from kvnet_node.swarms import SwarmFiles


class Typed(io.StringIO):
    """A terminal at which somebody types."""

    def isatty(self) -> bool:
        return True


def invocation(data_dir: Path | None = None) -> tuple[Invocation, io.StringIO]:
    shown = io.StringIO()
    return Invocation(GlobalFlags(data_dir=data_dir), Output(stderr=shown)), shown


def test_only_a_whole_yes_is_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    context, shown = invocation()
    monkeypatch.setattr("sys.stdin", Typed("yes\ny\n\n"))
    confirm(context, "It goes. Remove it?", "not removed")
    for _ in range(3):
        with pytest.raises(UsageError, match="not removed: the answer was not yes"):
            confirm(context, "It goes. Remove it?", "not removed")
    assert shown.getvalue().startswith("It goes. Remove it? Type yes:")


def test_without_a_terminal_the_hint_is_the_command_with_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    with pytest.raises(UsageError, match="somebody at a terminal") as refused:
        require_terminal("who is removed", "kvnet swarm remove bob --yes")
    assert refused.value.hint == "kvnet swarm remove bob --yes says it beforehand"


def test_leaving_and_removing_everywhere_ask_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    context, _ = invocation(tmp_path)
    swarms = SwarmFiles(prepare_data_dir(tmp_path).namespaces_dir)
    swarms.load()
    swarms.make_swarm("team")
    with pytest.raises(UsageError, match="leaves a swarm"):
        leave("team", context=context)
    with pytest.raises(UsageError, match="removed from all your machines"):
        remove("project", everywhere=True, context=context)
