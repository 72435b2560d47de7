"""The error tree drawn in `kvnet.errors` is the tree there is, and its codes can be relied on."""

import re
from collections.abc import Iterator

import kvnet_node.failures
from kvnet import errors
from kvnet.errors import KvnetError

EXIT_CODES = {1, 2, 10, 20, 30, 40, 50, 60, 70, 80, 130}


def tree(root: type[KvnetError] = KvnetError, depth: int = 0) -> Iterator[tuple[int, type[KvnetError]]]:
    yield depth, root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child, depth + 1)


def drawn() -> list[tuple[int, str, int]]:
    """Return (depth, class name, exit code) of each line of the drawing in the docstring."""
    rows = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"    (?P<lead>[│├└─ ]*)(?P<name>[A-Z]\w+) +(?P<exit>\d+)(?: .*)?", line)
        if match:
            rows.append((len(match["lead"]) // 4, match["name"], int(match["exit"])))
    return rows


def test_the_drawn_tree_is_the_tree() -> None:
    assert drawn() == [(depth, kind.__name__, kind.exit_code) for depth, kind in tree()]


def test_every_code_is_one_class_and_every_exit_code_is_documented() -> None:
    codes = [kind.code for _, kind in tree()]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z][a-z_]*", code) for code in codes)
    assert {kind.exit_code for _, kind in tree()} == EXIT_CODES


def test_a_message_and_a_hint_reach_the_report() -> None:
    failure = kvnet_node.failures.failure_of(errors.NotInStoreError("expected it, found nothing", hint="kvnet list"))
    assert (failure.code, failure.exit_code) == ("not_in_store", 50)
    assert (failure.message, failure.hint) == ("expected it, found nothing", "kvnet list")
