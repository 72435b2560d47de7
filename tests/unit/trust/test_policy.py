"""Policies: whose artifacts are used, and that nothing is laundered on the way."""

import pytest

from kvnet.errors import ConfigError
from kvnet.trust.envelope import open_manifest
from kvnet.trust.keys import publisher_text
from kvnet.trust.policy import Accepted, Refusal, RefusalCode, TrustPolicy
from tests.unit.trust.samples import FRIEND, OWN, STRANGER, make_artifact, span


def policy(name: str, *, revoked: frozenset[bytes] = frozenset()) -> TrustPolicy:
    return TrustPolicy(
        name,  # type: ignore[arg-type]
        own=frozenset({OWN.public}),
        trusted=frozenset({FRIEND.public}),
        revoked=revoked,
    )


ALL_REVOKED = frozenset({OWN.public, FRIEND.public})


@pytest.mark.parametrize("name", ["own", "trusted"])
def test_own_artifacts_are_used_under_every_policy(name: str) -> None:
    assert policy(name).judge(make_artifact().manifest) == Accepted(OWN.public, own=True)


def test_trusted_publishers_count_under_the_policy_trusted() -> None:
    assert policy("trusted").judge(make_artifact(key=FRIEND).manifest) == Accepted(FRIEND.public, own=False)


@pytest.mark.parametrize(
    ("name", "signer", "code"),
    [
        ("own", FRIEND, RefusalCode.NOT_OWN),
        ("own", STRANGER, RefusalCode.NOT_OWN),
        ("trusted", STRANGER, RefusalCode.UNTRUSTED_PUBLISHER),
    ],
)
def test_unknown_publishers_follow_the_policy_and_the_refusal_says_why(name, signer, code) -> None:  # type: ignore[no-untyped-def]
    refusal = policy(name).judge(make_artifact(key=signer).manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == code.value
    assert publisher_text(signer.public) in refusal.text
    assert refusal.publisher == signer.public


@pytest.mark.parametrize(
    ("name", "source", "code"),
    [
        ("own", FRIEND, RefusalCode.DERIVED_FROM_NOT_OWN),
        ("own", STRANGER, RefusalCode.DERIVED_FROM_NOT_OWN),
        ("trusted", STRANGER, RefusalCode.DERIVED_FROM_UNTRUSTED),
    ],
)
def test_artifact_derived_from_somebody_not_believed_is_not_used(name, source, code) -> None:  # type: ignore[no-untyped-def]
    refusal = policy(name).judge(make_artifact(derived_from=(span(source, 0, 1),)).manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == code.value
    assert "its blocks 0 to 1 come from an artifact signed by" in refusal.text
    assert refusal.publisher == source.public


def test_every_span_counts_not_only_the_first() -> None:
    manifest = make_artifact(derived_from=(span(FRIEND, 0, 0), span(STRANGER, 1, 1))).manifest
    refusal = policy("trusted").judge(manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.publisher == STRANGER.public


def test_artifact_derived_from_believed_publishers_is_used() -> None:
    manifest = make_artifact(derived_from=(span(FRIEND, 0, 0), span(OWN, 1, 1))).manifest
    assert policy("trusted").judge(manifest) == Accepted(OWN.public, own=True)


@pytest.mark.parametrize("name", ["own", "trusted"])
def test_revoked_keys_count_for_nothing_own_ones_included(name: str) -> None:
    refusal = policy(name, revoked=ALL_REVOKED).judge(make_artifact().manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "revoked_publisher"
    assert "revoked" in refusal.text


def test_revocation_reaches_what_was_derived() -> None:
    manifest = make_artifact(derived_from=(span(FRIEND),)).manifest
    refusal = policy("trusted", revoked=frozenset({FRIEND.public})).judge(manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "derived_from_revoked"


def test_only_what_is_revoked_is_not_served() -> None:
    strangers = make_artifact(key=STRANGER).manifest
    derived = make_artifact(derived_from=(span(FRIEND),)).manifest
    assert policy("own").may_serve(strangers)
    assert policy("own").may_serve(derived)
    assert not policy("own", revoked=ALL_REVOKED).may_serve(make_artifact(key=FRIEND).manifest)
    assert not policy("own", revoked=frozenset({FRIEND.public})).may_serve(derived)


def test_artifact_relayed_by_anybody_counts_by_its_signer() -> None:
    relayed = open_manifest(make_artifact(key=FRIEND).envelope)
    assert isinstance(policy("trusted").judge(relayed.manifest), Accepted)


def test_refusal_codes_are_stable() -> None:
    assert {code.value for code in RefusalCode} == {
        "revoked_publisher", "not_own", "untrusted_publisher",
        "derived_from_revoked", "derived_from_not_own", "derived_from_untrusted",
    }  # fmt: skip


def test_unknown_policy_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="expected the trust policy own or trusted, found 'everybody'"):
        policy("everybody")
