import pytest

from kvnet_node import app
from kvnet_node.app import main


@pytest.mark.parametrize(
    ("arguments", "found", "next_step"),
    [
        (["lst"], 'Did you mean "list"?', "kvnet --help"),
        (["key", "tust"], 'Did you mean "trust"?', "kvnet key --help"),
        (["key", "trust"], "PUBLISHER", "kvnet key trust --help"),
        (["status", "extra"], "expected no further argument, found 'extra'", "kvnet status --help"),
        (["--all", "list"], "expected a verb before its flags, found '--all'", "kvnet --help"),
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


def test_every_verb_stands_under_one_heading_of_the_help() -> None:
    verbs = [name for name, _, _ in (*app._VERBS, *app._GROUPS)]
    listed = [verb for _, below in app._HEADINGS for verb in below]
    assert sorted(listed) == sorted(verbs)


def test_what_ends_every_help_text_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert app._EPILOGUE.strip() in "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
