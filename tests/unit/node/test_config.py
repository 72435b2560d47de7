from pathlib import Path

import pytest

from kvnet.errors import ConfigError
from kvnet_node.config import default_min_free_bytes, default_quota_bytes, load_config
from kvnet_node.models import missing_model_paths
from kvnet_node.settings import GIGABYTE, SETTINGS, nearest_key, parse_size_bytes


def write(data_dir: Path, text: str) -> None:
    (data_dir / "config.toml").write_text(text, encoding="utf-8")


def test_every_value_names_where_it_came_from(tmp_path: Path) -> None:
    write(tmp_path, '[model]\ndefault = "file"\n[trust]\npolicy = "own"\n[store]\nquota_bytes = "3 GB"\n')
    config = load_config(
        tmp_path,
        flags={"model.default": "flag", "network.listen": None},
        environment={"KVNET_STORE_QUOTA_BYTES": "5GB", "KVNET_MODEL_DEFAULT": "environment"},
    )
    assert (config.model_default, config.origins["model.default"]) == ("flag", "flag")
    assert (config.quota_bytes, config.origins["store.quota_bytes"]) == (5 * GIGABYTE, "environment")
    assert (config.trust_policy, config.origins["trust.policy"]) == ("own", "config.toml")
    assert config.origins["reuse.numerics"] == "default"


def test_every_setting_has_a_value_and_an_origin(tmp_path: Path) -> None:
    config = load_config(tmp_path, environment={})
    keys = {setting.key for setting in SETTINGS}
    assert set(config.values()) == set(config.origins) == keys


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ('[trust]\npolcy = "own"', "trust.policy"),
        ("[store]\nquota = 1", "store.quota_bytes"),
        ("[network]\nlisten_on = []", "network.listen"),
        ('numerics = "exact"', "reuse.numerics"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(tmp_path: Path, text: str, nearest: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError, match="unknown setting") as raised:
        load_config(tmp_path, environment={})
    assert nearest in raised.value.hint


@pytest.mark.parametrize(
    "text",
    [
        '[trust]\npolicy = "anybody"',
        "[store]\nquota_bytes = -1",
        '[store]\nquota_bytes = "many"',
        "[store]\nquota_bytes = true",
        "[model]\npaths = [1]",
        "[model]\ndefault = 3",
        "[announce]\ninterval_s = 0",
        '[reuse]\nnumerics = "roughly"',
        "this is not TOML",
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError):
        load_config(tmp_path, environment={})


def test_a_bad_value_in_the_environment_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KVNET_TRUST_POLICY"):
        load_config(tmp_path, environment={"KVNET_TRUST_POLICY": "everyone"})


def test_lists_in_the_environment_are_separated_by_commas(tmp_path: Path) -> None:
    config = load_config(tmp_path, environment={"KVNET_NETWORK_LISTEN": "127.0.0.1:0, [::1]:0"})
    assert config.listen == ("127.0.0.1:0", "[::1]:0")
    assert config.listen_asked


def test_default_ports_are_not_asked_for(tmp_path: Path) -> None:
    assert not load_config(tmp_path, environment={}).listen_asked


@pytest.mark.parametrize(
    ("value", "size"), [(7, 7), ("7", 7), ("20 GB", 20 * GIGABYTE), ("1.5kB", 1500), ("2 MiB", 2 * 1024**2)]
)
def test_sizes_are_numbers_or_texts_with_a_unit(value: object, size: int) -> None:
    assert parse_size_bytes(value) == size


@pytest.mark.parametrize("value", ["", "GB", "1 XB", "-1", 1.5, None, "1 GB free"])
def test_other_sizes_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="number of bytes"):
        parse_size_bytes(value)


def test_the_default_quota_is_a_fifth_of_what_is_free_up_to_50_gb() -> None:
    assert default_quota_bytes(100 * GIGABYTE, 0) == 20 * GIGABYTE
    assert default_quota_bytes(900 * GIGABYTE, 0) == 50 * GIGABYTE


def test_the_default_quota_does_not_shrink_as_the_store_fills() -> None:
    assert default_quota_bytes(90 * GIGABYTE, 10 * GIGABYTE) == default_quota_bytes(100 * GIGABYTE, 0)


def test_what_stays_free_is_20_gb_on_a_large_disk_and_less_on_a_small_or_full_one() -> None:
    assert default_min_free_bytes(500 * GIGABYTE, 1000 * GIGABYTE) == 20 * GIGABYTE
    assert default_min_free_bytes(60 * GIGABYTE, 100 * GIGABYTE) == 10 * GIGABYTE
    assert default_min_free_bytes(8 * GIGABYTE, 100 * GIGABYTE) == 4 * GIGABYTE


def test_the_nearest_key_is_the_most_alike() -> None:
    assert nearest_key("announce.interval") == "announce.interval_s"


@pytest.mark.parametrize("text", ["/a:/b c", "/a, /b c", "/a:/b c,"])
def test_folders_in_the_environment_are_separated_as_in_path_or_by_commas(tmp_path: Path, text: str) -> None:
    assert load_config(tmp_path, environment={"KVNET_MODEL_PATHS": text}).model_paths == ("/a", "/b c")


def test_folders_in_the_file_keep_their_colons_and_commas(tmp_path: Path) -> None:
    write(tmp_path, '[model]\npaths = ["/a:b", "/c,d"]\n')
    assert load_config(tmp_path, environment={}).model_paths == ("/a:b", "/c,d")


def test_a_file_that_is_no_toml_is_refused_with_the_next_step(tmp_path: Path) -> None:
    write(tmp_path, "[model]\ndefault = m\n")
    with pytest.raises(ConfigError, match="not valid TOML") as raised:
        load_config(tmp_path, environment={})
    assert raised.value.hint


def test_configured_folders_that_are_missing_are_known(tmp_path: Path) -> None:
    config = load_config(tmp_path, environment={"KVNET_MODEL_PATHS": f"{tmp_path}:{tmp_path}/gone"})
    assert missing_model_paths(config) == [f"{tmp_path}/gone"]
