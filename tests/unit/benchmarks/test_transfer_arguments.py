"""What the transfer benchmark is asked, before anything is measured."""

import pytest

from benchmarks.transfer import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size-mib", "16"], "expected --size-mib of at least 28, a block of K/V; found 16"),
        (["--rounds", "0"], "expected at least one of --rounds, found 0"),
        (["--rows", "disk,tape"], "found tape"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err
