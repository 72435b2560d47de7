"""The settings: their keys, what each may be, what it is unless somebody says otherwise, and what it does."""

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvnet.errors import ConfigError

GIGABYTE = 1_000_000_000
DEFAULT_API_LISTEN = ("127.0.0.1:5863",)
"""Where the HTTP endpoint listens: this machine alone."""
DEFAULT_MODEL_ALIASES = ("claude-*=default",)
"""Agents ask for these whatever model they are told, at least for side jobs; the node's own choice answers."""
DEFAULT_PORT = 5864
DEFAULT_LISTEN = (f"0.0.0.0:{DEFAULT_PORT}", f"[::]:{DEFAULT_PORT}")
"""All interfaces, IPv4 and IPv6."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the configuration.

    Attributes:
        key: dotted name, ``section.name`` in TOML and ``KVNET_SECTION_NAME`` in the environment.
        field: of `Config`, which holds its value.
        parse: turns a TOML value or a text into the value; raises ValueError saying what was expected.
        default: the value unless somebody says otherwise; of some sizes the disk decides (`config.load_config`).
        help: one line for the documentation.
        secret: shown to nobody, only whether it is set.
    """

    key: str
    field: str
    parse: Callable[[Any], Any]
    default: Any
    help: str
    secret: bool = False

    @property
    def environment_name(self) -> str:
        """The environment variable that sets this key."""
        return "KVNET_" + self.key.upper().replace(".", "_")

    def shown(self, value: Any) -> Any:
        """A value of this setting as people are shown it, and as JSON holds it."""
        if self.secret:
            return "(set)" if value else ""
        if value is None:
            return "auto"
        return list(value) if isinstance(value, tuple) else value


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?")
_SWITCHES = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_UNITS = {
    None: 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("expected a text")


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise ValueError("expected a list of texts")


def _paths(value: Any) -> tuple[str, ...]:
    """Folders: a list; or a text with the system's separator of paths, or commas, between them."""
    if isinstance(value, str):
        value = value.replace(os.pathsep, ",")
    return _texts(value)


def parse_size_bytes(value: Any) -> int:
    """A number of bytes: an integer, or a text such as ``"20 GB"`` or ``"512 MiB"``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    raise ValueError('expected a number of bytes, such as 20000000000 or "20 GB"')


def _size_or_auto(value: Any) -> int | None:
    """A number of bytes; None for what the engine chooses itself."""
    return None if value == "auto" else parse_size_bytes(value)


def _seconds(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 < number < 10**9:
        raise ValueError("expected a number of seconds above 0")
    return number


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _SWITCHES:
        return _SWITCHES[value.lower()]
    raise ValueError("expected on or off")


def _count(value: Any) -> int:
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 10**9:
        raise ValueError("expected a whole number above 0")
    return number


def _aliases(value: Any) -> tuple[str, ...]:
    """Aliases of models as texts, each one checked."""
    # Imported when one is set: command lines that read no alias start without the endpoint's parts.
    from kvnet_node.api.aliases import parse_alias

    texts = _texts(value)
    for text in texts:
        parse_alias(text)
    return texts


def _one_of(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError("expected " + " or ".join(f'"{choice}"' for choice in choices))
        return str(value)

    return parse


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "model.default", "model_default", _text, "", "the model used when --model is not given: a name or a folder"
    ),
    Setting(
        "model.paths",
        "model_paths",
        _paths,
        (),
        "further folders to look for MLX models in; in the environment with `:` or `,` between them",
    ),
    Setting("trust.policy", "trust_policy", _one_of("own", "trusted"), "trusted", "whose artifacts are used"),
    Setting("store.quota_bytes", "quota_bytes", parse_size_bytes, None, "the most the store may hold"),
    Setting("store.min_free_bytes", "min_free_bytes", parse_size_bytes, None, "what the store leaves free on its disk"),
    Setting(
        "store.scrub_interval_s",
        "scrub_interval_s",
        _seconds,
        7 * 24 * 3600.0,
        "seconds after which a running node reads its store through again",
    ),
    Setting(
        "store.scrub_bytes_s", "scrub_bytes_s", parse_size_bytes, 32_000_000, "the most bytes a second that this reads"
    ),
    Setting(
        "store.ram_only",
        "ram_only",
        _switch,
        False,
        "keep nothing of prompts on disk: the store is in RAM, ends with the node",
    ),
    Setting("store.keep_days", "keep_days", _count, 7, "days after which what was kept unasked, and not used, goes"),
    Setting(
        "store.write_budget_bytes_day",
        "write_budget_bytes_day",
        parse_size_bytes,
        20 * GIGABYTE,
        "bytes a day that may be written without being asked for by name; 0 keeps no conversations",
    ),
    Setting(
        "network.listen",
        "listen",
        _texts,
        DEFAULT_LISTEN,
        "addresses to listen on, HOST:PORT each; port 0 is any free one",
    ),
    Setting(
        "bulk.listen",
        "bulk_listen",
        _texts,
        (),
        "addresses for bulk connections, HOST:PORT each; port 0 is any free one",
    ),
    Setting(
        "bulk.cipher",
        "bulk_cipher",
        _one_of("tls13", "none"),
        "tls13",
        "none: no encryption, for a cable that both owners trust",
    ),
    Setting(
        "limits.upload_bytes_s",
        "upload_bytes_s",
        parse_size_bytes,
        0,
        "chunk bytes a second sent to all peers together; 0: no limit",
    ),
    Setting(
        "limits.download_bytes_s",
        "download_bytes_s",
        parse_size_bytes,
        0,
        "chunk bytes a second fetched from all peers; 0: no limit",
    ),
    Setting("network.bootstrap", "bootstrap", _texts, (), "addresses of nodes to connect to at start, /ip4/…/p2p/…"),
    Setting(
        "reuse.numerics",
        "numerics",
        _one_of("compatible", "exact"),
        "compatible",
        "whether state from other chips or versions is used",
    ),
    Setting(
        "reuse.lossy",
        "lossy",
        _one_of("never", "slow_links", "always"),
        "never",
        "when state stored with a lossy codec (q8) is used: it can change words of an answer",
    ),
    Setting(
        "announce.interval_s",
        "announce_interval_s",
        _seconds,
        900.0,
        "seconds after which artifacts are announced again",
    ),
    Setting(
        "public.enabled",
        "public_enabled",
        _switch,
        False,
        "whether this node takes part in what was published for everybody: on or off",
    ),
    Setting(
        "lan.discovery",
        "lan_discovery",
        _switch,
        True,
        "whether neighbours on the local network are looked for by mDNS: on or off",
    ),
    Setting(
        "guest.on_battery",
        "guest_on_battery",
        _one_of("auto", "serve"),
        "auto",
        "auto: serve nothing on battery; serve: on battery as on mains",
    ),
    Setting(
        "guest.metered",
        "guest_metered",
        _one_of("auto", "yes", "no"),
        "auto",
        "whether the link is metered, on which nothing is served; auto asks NetworkManager, and nobody on macOS",
    ),
    Setting("api.enabled", "api_enabled", _switch, True, "whether the running node answers HTTP clients: on or off"),
    Setting(
        "api.listen",
        "api_listen",
        _texts,
        DEFAULT_API_LISTEN,
        "addresses of the HTTP endpoint, HOST:PORT each; port 0 is any free one",
    ),
    Setting(
        "api.token",
        "api_token",
        _text,
        "",
        "what clients must send as `Authorization: Bearer`; needed beyond this machine",
        secret=True,
    ),
    Setting(
        "api.allowed_hosts",
        "api_allowed_hosts",
        _texts,
        (),
        "further names clients may reach the endpoint by (`Host` header)",
    ),
    Setting(
        "api.allowed_origins",
        "api_allowed_origins",
        _texts,
        (),
        "web pages that may use the endpoint, such as http://localhost:3000",
    ),
    Setting("api.max_body_bytes", "api_max_body_bytes", parse_size_bytes, 64 << 20, "the longest request body"),
    Setting("api.max_tokens", "api_max_tokens", _count, 4096, "tokens generated at most when a request does not say"),
    Setting(
        "api.model_aliases",
        "api_model_aliases",
        _aliases,
        DEFAULT_MODEL_ALIASES,
        "what models that are not here mean, FROM=TO each; the first that fits",
    ),
    Setting(
        "api.queue_requests",
        "api_queue_requests",
        _count,
        32,
        "requests that may wait or run at one engine; more get 503",
    ),
    Setting(
        "api.drain_s", "api_drain_s", _seconds, 20.0, "seconds that running requests get when the node is told to stop"
    ),
    Setting(
        "engine.idle_unload_s",
        "engine_idle_unload_s",
        _seconds,
        900.0,
        "seconds after which a model that nobody uses leaves memory",
    ),
    Setting(
        "engine.live_bytes",
        "live_bytes",
        _size_or_auto,
        None,
        (
            "memory a loaded model keeps conversations in between requests; 0 keeps none, auto is a quarter of what "
            "its weights leave"
        ),
    ),
    Setting(
        "prompt.remove_billing_line",
        "remove_billing_line",
        _switch,
        True,
        "whether the billing line some agents send is taken out of prompts",
    ),
)
"""All of them, in the order of the documentation."""

_BY_KEY = {setting.key: setting for setting in SETTINGS}


def nearest_key(key: str) -> str:
    """The known key most like a misspelt one."""
    return max(_BY_KEY, key=lambda known: difflib.SequenceMatcher(None, key, known).ratio())


def parse_setting(key: str, value: Any, where: str) -> Any:
    """The value of a setting, from what stands for it in `where`.

    Raises:
        ConfigError: an unknown key (naming the nearest), or a value of the wrong kind.
    """
    setting = _BY_KEY.get(key)
    if setting is None:
        raise ConfigError(
            f"unknown setting {key!r} in {where}",
            hint=f"did you mean {nearest_key(key)!r}? kvnet config show lists all",
        )
    try:
        return setting.parse(value)
    except ValueError as error:
        raise ConfigError(f"{key} in {where}: {error}, found {value!r}") from error
