"""Who may use the endpoint."""

import pytest

from kvnet_node.api.guard import GuardRules, host_allowed, origin_allowed, preflight_headers, refusal, token_refusal

OPEN = GuardRules()
LOCAL = "127.0.0.1"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:5863", "127.0.0.1", "localhost:5863", "LOCALHOST", "localhost.:1", "a.localhost", "[::1]:5863",
     "[::1]", "127.8.8.8:1", "host.docker.internal:5863"],
)  # fmt: skip
def test_names_of_this_machine_are_let_in(host: str) -> None:
    assert host_allowed(host, OPEN, LOCAL)


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:5863", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.1.5:5863",
     "[::1]evil", "[::1", "::1", "127.0.0.1:port", "localhost:123456", "127.0.0.1@evil.example", "0.0.0.0:5863",
     "evil.example:127.0.0.1", "2130706433"],
)  # fmt: skip
def test_other_names_are_turned_away_though_they_lead_here(host: str) -> None:
    assert not host_allowed(host, OPEN, LOCAL)
    found = refusal({"host": host}, OPEN, LOCAL)
    assert found is not None
    assert (found.status, found.code) == (403, "host_not_allowed")


def test_a_name_of_ones_own_and_the_address_one_was_reached_at_are_let_in() -> None:
    assert host_allowed("Mac-Studio.local:5863", GuardRules(hosts=("mac-studio.local",)), LOCAL)
    assert host_allowed("192.168.1.5:5863", OPEN, "192.168.1.5")


@pytest.mark.parametrize(
    ("origin", "rules", "allowed"),
    [
        ("http://127.0.0.1:5863", (), True),
        ("http://localhost:3000", (), False),
        ("https://evil.example", (), False),
        ("null", (), False),
        ("null", ("null",), True),
        ("http://localhost:3000", ("http://localhost:3000",), True),
        ("http://localhost:3000", ("http://localhost:*",), True),
        ("http://localhost", ("http://localhost:*",), False),
        ("http://localhost:3000.evil.example", ("http://localhost:*",), False),
        ("http://localhost.evil.example", ("http://localhost:*",), False),
        ("app://obsidian.md", ("app://*",), True),
        ("https://app", ("app://*",), False),
        ("https://anything.example", ("*",), True),
    ],
)
def test_pages_are_let_in_by_their_origin(origin: str, rules: tuple[str, ...], *, allowed: bool) -> None:
    assert origin_allowed(origin, "127.0.0.1:5863", GuardRules(origins=rules)) is allowed


def test_a_program_that_is_no_page_has_no_origin_and_is_let_in() -> None:
    assert refusal({"host": "localhost"}, OPEN, LOCAL) is None
    found = refusal({"host": "localhost", "origin": "https://evil.example"}, OPEN, LOCAL)
    assert found is not None
    assert (found.status, found.code) == (403, "origin_not_allowed")


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"authorization": "Bearer secret"}, True),
        ({"authorization": "bearer  secret "}, True),
        ({"x-api-key": "secret"}, True),
        ({"authorization": "Basic secret", "x-api-key": "secret"}, True),
        ({"authorization": "Bearer secre"}, False),
        ({"authorization": "Bearer secrets"}, False),
        ({"authorization": "Bearer \u00fc"}, False),
        ({"x-api-key": ""}, False),
        ({}, False),
    ],
)
def test_the_token_is_taken_from_either_header(headers: dict[str, str], *, allowed: bool) -> None:
    found = token_refusal(headers, GuardRules(token="secret"))
    assert (found is None) is allowed
    if found is not None:
        assert (found.status, found.code, found.headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        assert "secret" not in found.message


def test_without_a_token_nothing_is_asked_for() -> None:
    assert token_refusal({}, OPEN) is None


def test_a_preflight_allows_the_headers_that_were_asked_for() -> None:
    found = preflight_headers("http://localhost:3000", "authorization,x-stainless-os")
    assert found["access-control-allow-origin"] == "http://localhost:3000"
    assert found["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert "POST" in found["access-control-allow-methods"]
    assert "Origin" in found["vary"]
