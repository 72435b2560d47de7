"""Settings: built-in defaults, ``config.toml`` in the data directory, ``KVNET_*`` in the environment, then flags.

Later ones win, and every value remembers where it came from (``kvnet config show``). A key nobody knows is an error
that names the nearest one: a misspelt setting must not be silently without effect.
"""

import os
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvnet.errors import ConfigError
from kvnet_node.settings import GIGABYTE, SETTINGS, parse_setting

MAX_DEFAULT_QUOTA_BYTES = 50 * GIGABYTE
"""The quota never exceeds this unless the owner says so."""
DEFAULT_MIN_FREE_BYTES = 20 * GIGABYTE
"""Left free on a large disk; see ``default_min_free_bytes`` for smaller or fuller ones."""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, resolved. ``origins`` says for every key where its value came from.

    Attributes:
        model_default: name or folder of the model used without ``--model``; "" when none is chosen.
        model_paths: further folders with MLX models.
        trust_policy: "own" or "trusted".
        quota_bytes: the most the store may hold.
        min_free_bytes: what stays free on its disk.
        scrub_interval_s: seconds from one reading through of the store to the next.
        scrub_bytes_s: the most bytes a second that this reads; 0 for no limit.
        ram_only: the store is in RAM, and ends with the node.
        keep_days: days without use after which what is not pinned goes.
        write_budget_bytes_day: what may be written in a day without being asked for by name; 0 for nothing.
        listen: HOST:PORT texts.
        listen_asked: whether the addresses were asked for (a taken port is then an error, not a reason to move).
        bulk_listen: HOST:PORT texts; empty: where ``listen`` says, on the default port or any free one.
        bulk_cipher: "tls13" or "none".
        upload_bytes_s: chunk bytes a second to all peers together; 0 for no limit.
        download_bytes_s: chunk bytes a second from all peers together; 0 for no limit.
        bootstrap: multiaddress texts.
        numerics: "compatible" or "exact".
        lossy: "never", "slow_links" or "always".
        announce_interval_s: seconds between two announcements of the same artifact.
        public_enabled: whether this node is in the public namespace.
        lan_discovery: whether neighbours on the local network are looked for.
        guest_on_battery: "auto" or "serve".
        guest_metered: "auto", "yes" or "no".
        api_enabled: whether the running node answers HTTP clients.
        api_listen: HOST:PORT texts.
        api_listen_asked: whether they were asked for.
        api_token: what clients must send; "" asks for nothing.
        api_allowed_hosts: further names in ``Host``.
        api_allowed_origins: values of ``Origin`` that are let in.
        api_max_body_bytes: the longest request body.
        api_max_tokens: of an answer whose request does not say.
        api_model_aliases: FROM=TO texts: what models that are not here mean.
        api_queue_requests: at one engine, running ones included.
        api_drain_s: what running requests get at the end.
        engine_idle_unload_s: after which an unused engine ends.
        live_bytes: of K/V an engine keeps between requests; None for its own choice.
        remove_billing_line: take it out of prompts.
        origins: key -> "default", "config.toml", "environment" or "flag".
    """

    model_default: str
    model_paths: tuple[str, ...]
    trust_policy: str
    quota_bytes: int
    min_free_bytes: int
    scrub_interval_s: float
    scrub_bytes_s: int
    ram_only: bool
    keep_days: int
    write_budget_bytes_day: int
    listen: tuple[str, ...]
    listen_asked: bool
    bulk_listen: tuple[str, ...]
    bulk_cipher: str
    upload_bytes_s: int
    download_bytes_s: int
    bootstrap: tuple[str, ...]
    numerics: str
    lossy: str
    announce_interval_s: float
    public_enabled: bool
    lan_discovery: bool
    guest_on_battery: str
    guest_metered: str
    api_enabled: bool
    api_listen: tuple[str, ...]
    api_listen_asked: bool
    api_token: str
    api_allowed_hosts: tuple[str, ...]
    api_allowed_origins: tuple[str, ...]
    api_max_body_bytes: int
    api_max_tokens: int
    api_model_aliases: tuple[str, ...]
    api_queue_requests: int
    api_drain_s: float
    engine_idle_unload_s: float
    live_bytes: int | None
    remove_billing_line: bool
    origins: Mapping[str, str]

    def values(self) -> dict[str, Any]:
        """Every key and its value, in the order of the documentation; of a secret only whether there is one."""
        return {setting.key: setting.shown(getattr(self, setting.field)) for setting in SETTINGS}


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _file_values(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        table = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}",
            hint="correct that line; texts stand in quotes, sections in brackets: kvnet config show lists the keys",
        ) from error
    return _flatten(table)


def _disk_free_and_total(directory: Path) -> tuple[int, int]:
    while not directory.exists():
        directory = directory.parent
    usage = shutil.disk_usage(directory)
    return usage.free, usage.total


def _held_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def default_quota_bytes(free_bytes: int, held_bytes: int) -> int:
    """50 GB, or 20 % of what is free where that is less; what the store already holds counts as free."""
    return min(MAX_DEFAULT_QUOTA_BYTES, (free_bytes + held_bytes) // 5)


def default_min_free_bytes(free_bytes: int, total_bytes: int) -> int:
    """20 GB; on smaller or fuller disks the least of that, a tenth of the disk, and half of what is free now.

    A node on a small disk is then still of use, and never takes the last half of what is left.
    """
    return min(DEFAULT_MIN_FREE_BYTES, total_bytes // 10, free_bytes // 2)


def _disk_defaults(data_dir: Path) -> dict[str, Any]:
    """Values by key that depend on the disk that the store is on."""
    free, total = _disk_free_and_total(data_dir)
    return {
        "store.quota_bytes": default_quota_bytes(free, _held_bytes(data_dir / "store")),
        "store.min_free_bytes": default_min_free_bytes(free, total),
    }


def load_config(
    data_dir: Path, *, flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """Read all sources and resolve every setting.

    Args:
        data_dir: the data directory; neither it nor its ``config.toml`` needs to exist.
        flags: dotted key -> value given on the command line; values that are None or empty are ignored.
        environment: by default the process's own.

    Raises:
        ConfigError: an unknown key (naming the nearest), a value of the wrong kind, or a file that is not TOML.
    """
    environment = os.environ if environment is None else environment
    values = {setting.key: setting.default for setting in SETTINGS} | _disk_defaults(data_dir)
    origins = dict.fromkeys(values, "default")
    for key, value in _file_values(data_dir / "config.toml").items():
        values[key], origins[key] = parse_setting(key, value, "config.toml"), "config.toml"
    for setting in SETTINGS:
        if (text := environment.get(setting.environment_name)) is not None:
            values[setting.key] = parse_setting(setting.key, text, setting.environment_name)
            origins[setting.key] = "environment"
    for key, value in (flags or {}).items():
        if value is not None and value not in ([], (), ""):
            values[key], origins[key] = parse_setting(key, value, "the command line"), "flag"
    return Config(
        **{setting.field: values[setting.key] for setting in SETTINGS},
        listen_asked=origins["network.listen"] != "default",
        api_listen_asked=origins["api.listen"] != "default",
        origins=origins,
    )
