import pytest

from kvnet_node.app import main


@pytest.mark.parametrize(
    ("arguments", "found", "next_step"),
    [
        (["lst"], 'Did you mean "list"?', "kvnet --help"),
        (["key", "tust"], 'Did you mean "trust"?', "kvnet key --help"),
        (["key", "trust"], "PUBLISHER", "kvnet key trust --help"),
        (["status", "extra"], "expected no further argument, found 'extra'", "kvnet status --help"),
        (["--all", "list"], "--all", "kvnet --help"),
    ],
)
def test_a_wrong_command_line_names_a_help_text_that_exists(
    capsys: pytest.CaptureFixture[str], arguments: list[str], found: str, next_step: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert found in captured.err
    assert captured.err.splitlines()[-1].strip() == next_step
