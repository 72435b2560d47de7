"""Settings: built-in defaults, ``config.toml`` in the data directory, ``KVNET_*`` in the environment, then flags.

Later ones win, and every value remembers where it came from (``kvnet config show``). A key nobody knows is an error
that names the nearest one: a misspelt setting must not be silently without effect.
"""

import difflib
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvnet.errors import ConfigError

GIGABYTE = 1_000_000_000
MAX_DEFAULT_QUOTA_BYTES = 50 * GIGABYTE
"""The quota never exceeds this unless the owner says so."""
DEFAULT_MIN_FREE_BYTES = 20 * GIGABYTE
"""Left free on a large disk; see ``default_min_free_bytes`` for smaller or fuller ones."""
DEFAULT_API_LISTEN = ("127.0.0.1:5863",)
"""Where the HTTP endpoint listens: this machine alone."""
DEFAULT_MODEL_ALIASES = ("claude-*=default",)
"""Agents ask for these whatever model they are told, at least for side jobs; the node's own choice answers."""
DEFAULT_PORT = 5864
DEFAULT_LISTEN = (f"0.0.0.0:{DEFAULT_PORT}", f"[::]:{DEFAULT_PORT}")
"""All interfaces, IPv4 and IPv6."""

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


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the configuration.

    Attributes:
        key: dotted name, ``section.name`` in TOML and ``KVNET_SECTION_NAME`` in the environment.
        parse: turns a TOML value or a text into the value; raises ValueError saying what was expected.
        help: one line for the documentation.
    """

    key: str
    parse: Callable[[Any], Any]
    help: str

    @property
    def environment_name(self) -> str:
        """The environment variable that sets this key."""
        return "KVNET_" + self.key.upper().replace(".", "_")


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
    Setting("model.default", _text, "the model used when --model is not given: a name or a folder"),
    Setting(
        "model.paths",
        _paths,
        "further folders to look for MLX models in; in the environment with `:` or `,` between them",
    ),
    Setting("trust.policy", _one_of("own", "trusted"), "whose artifacts are used"),
    Setting("store.quota_bytes", parse_size_bytes, "the most the store may hold"),
    Setting("store.min_free_bytes", parse_size_bytes, "what the store leaves free on its disk"),
    Setting("store.scrub_interval_s", _seconds, "seconds after which a running node reads its store through again"),
    Setting("store.scrub_bytes_s", parse_size_bytes, "the most bytes a second that this reads"),
    Setting("store.ram_only", _switch, "keep nothing of prompts on disk: the store is in RAM, ends with the node"),
    Setting("store.keep_days", _count, "days after which what was kept unasked, and not used, goes"),
    Setting(
        "store.write_budget_bytes_day",
        parse_size_bytes,
        "bytes a day that may be written without being asked for by name; 0 keeps no conversations",
    ),
    Setting("network.listen", _texts, "addresses to listen on, HOST:PORT each; port 0 is any free one"),
    Setting("bulk.listen", _texts, "addresses for bulk connections, HOST:PORT each; port 0 is any free one"),
    Setting("bulk.cipher", _one_of("tls13", "none"), "none: no encryption, for a cable that both owners trust"),
    Setting("limits.upload_bytes_s", parse_size_bytes, "chunk bytes a second sent to all peers together; 0: no limit"),
    Setting("limits.download_bytes_s", parse_size_bytes, "chunk bytes a second fetched from all peers; 0: no limit"),
    Setting("network.bootstrap", _texts, "addresses of nodes to connect to at start, /ip4/…/p2p/…"),
    Setting("reuse.numerics", _one_of("compatible", "exact"), "whether state from other chips or versions is used"),
    Setting(
        "reuse.lossy",
        _one_of("never", "slow_links", "always"),
        "when state stored with a lossy codec (q8) is used: it can change words of an answer",
    ),
    Setting("announce.interval_s", _seconds, "seconds after which artifacts are announced again"),
    Setting("public.enabled", _switch, "whether this node takes part in what was published for everybody: on or off"),
    Setting("lan.discovery", _switch, "whether neighbours on the local network are looked for by mDNS: on or off"),
    Setting(
        "guest.on_battery", _one_of("auto", "serve"), "auto: serve nothing on battery; serve: on battery as on mains"
    ),
    Setting(
        "guest.metered",
        _one_of("auto", "yes", "no"),
        "whether the link is metered, on which nothing is served; auto asks NetworkManager, and nobody on macOS",
    ),
    Setting("api.enabled", _switch, "whether the running node answers HTTP clients: on or off"),
    Setting("api.listen", _texts, "addresses of the HTTP endpoint, HOST:PORT each; port 0 is any free one"),
    Setting("api.token", _text, "what clients must send as `Authorization: Bearer`; needed beyond this machine"),
    Setting("api.allowed_hosts", _texts, "further names clients may reach the endpoint by (`Host` header)"),
    Setting("api.allowed_origins", _texts, "web pages that may use the endpoint, such as http://localhost:3000"),
    Setting("api.max_body_bytes", parse_size_bytes, "the longest request body"),
    Setting("api.max_tokens", _count, "tokens generated at most when a request does not say"),
    Setting("api.model_aliases", _aliases, "what models that are not here mean, FROM=TO each; the first that fits"),
    Setting("api.queue_requests", _count, "requests that may wait or run at one engine; more get 503"),
    Setting("api.drain_s", _seconds, "seconds that running requests get when the node is told to stop"),
    Setting("engine.idle_unload_s", _seconds, "seconds after which a model that nobody uses leaves memory"),
    Setting(
        "engine.live_bytes",
        _size_or_auto,
        "memory a loaded model keeps conversations in between requests; 0 keeps none, auto is a quarter of what its "
        "weights leave",
    ),
    Setting("prompt.remove_billing_line", _switch, "whether the billing line some agents send is taken out of prompts"),
)

_BY_KEY = {setting.key: setting for setting in SETTINGS}


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
        return {
            "model.default": self.model_default,
            "model.paths": list(self.model_paths),
            "trust.policy": self.trust_policy,
            "store.quota_bytes": self.quota_bytes,
            "store.min_free_bytes": self.min_free_bytes,
            "store.scrub_interval_s": self.scrub_interval_s,
            "store.scrub_bytes_s": self.scrub_bytes_s,
            "store.ram_only": self.ram_only,
            "store.keep_days": self.keep_days,
            "store.write_budget_bytes_day": self.write_budget_bytes_day,
            "network.listen": list(self.listen),
            "bulk.listen": list(self.bulk_listen),
            "bulk.cipher": self.bulk_cipher,
            "limits.upload_bytes_s": self.upload_bytes_s,
            "limits.download_bytes_s": self.download_bytes_s,
            "network.bootstrap": list(self.bootstrap),
            "reuse.numerics": self.numerics,
            "reuse.lossy": self.lossy,
            "announce.interval_s": self.announce_interval_s,
            "public.enabled": self.public_enabled,
            "lan.discovery": self.lan_discovery,
            "guest.on_battery": self.guest_on_battery,
            "guest.metered": self.guest_metered,
            "api.enabled": self.api_enabled,
            "api.listen": list(self.api_listen),
            "api.token": "(set)" if self.api_token else "",
            "api.allowed_hosts": list(self.api_allowed_hosts),
            "api.allowed_origins": list(self.api_allowed_origins),
            "api.max_body_bytes": self.api_max_body_bytes,
            "api.max_tokens": self.api_max_tokens,
            "api.model_aliases": list(self.api_model_aliases),
            "api.queue_requests": self.api_queue_requests,
            "api.drain_s": self.api_drain_s,
            "engine.idle_unload_s": self.engine_idle_unload_s,
            "engine.live_bytes": "auto" if self.live_bytes is None else self.live_bytes,
            "prompt.remove_billing_line": self.remove_billing_line,
        }


def nearest_key(key: str) -> str:
    """The known key most like a misspelt one."""
    return max(_BY_KEY, key=lambda known: difflib.SequenceMatcher(None, key, known).ratio())


def _parse(key: str, value: Any, where: str) -> Any:
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
    free, total = _disk_free_and_total(data_dir)
    values: dict[str, Any] = {
        "model.default": "",
        "model.paths": (),
        "trust.policy": "trusted",
        "store.quota_bytes": default_quota_bytes(free, _held_bytes(data_dir / "store")),
        "store.min_free_bytes": default_min_free_bytes(free, total),
        "store.scrub_interval_s": 7 * 24 * 3600.0,
        "store.scrub_bytes_s": 32_000_000,
        "store.ram_only": False,
        "store.keep_days": 7,
        "store.write_budget_bytes_day": 20 * GIGABYTE,
        "network.listen": DEFAULT_LISTEN,
        "bulk.listen": (),
        "bulk.cipher": "tls13",
        "limits.upload_bytes_s": 0,
        "limits.download_bytes_s": 0,
        "network.bootstrap": (),
        "reuse.numerics": "compatible",
        "reuse.lossy": "never",
        "announce.interval_s": 900.0,
        "public.enabled": False,
        "lan.discovery": True,
        "guest.on_battery": "auto",
        "guest.metered": "auto",
        "api.enabled": True,
        "api.listen": DEFAULT_API_LISTEN,
        "api.token": "",
        "api.allowed_hosts": (),
        "api.allowed_origins": (),
        "api.max_body_bytes": 64 << 20,
        "api.max_tokens": 4096,
        "api.model_aliases": DEFAULT_MODEL_ALIASES,
        "api.queue_requests": 32,
        "api.drain_s": 20.0,
        "engine.idle_unload_s": 900.0,
        "engine.live_bytes": None,
        "prompt.remove_billing_line": True,
    }
    origins = dict.fromkeys(values, "default")
    for key, value in _file_values(data_dir / "config.toml").items():
        values[key], origins[key] = _parse(key, value, "config.toml"), "config.toml"
    for setting in SETTINGS:
        if (text := environment.get(setting.environment_name)) is not None:
            values[setting.key] = _parse(setting.key, text, setting.environment_name)
            origins[setting.key] = "environment"
    for key, value in (flags or {}).items():
        if value is not None and value not in ([], (), ""):
            values[key], origins[key] = _parse(key, value, "the command line"), "flag"
    return Config(
        model_default=values["model.default"],
        model_paths=values["model.paths"],
        trust_policy=values["trust.policy"],
        quota_bytes=values["store.quota_bytes"],
        min_free_bytes=values["store.min_free_bytes"],
        scrub_interval_s=values["store.scrub_interval_s"],
        scrub_bytes_s=values["store.scrub_bytes_s"],
        ram_only=values["store.ram_only"],
        keep_days=values["store.keep_days"],
        write_budget_bytes_day=values["store.write_budget_bytes_day"],
        listen=values["network.listen"],
        listen_asked=origins["network.listen"] != "default",
        bulk_listen=values["bulk.listen"],
        bulk_cipher=values["bulk.cipher"],
        upload_bytes_s=values["limits.upload_bytes_s"],
        download_bytes_s=values["limits.download_bytes_s"],
        bootstrap=values["network.bootstrap"],
        numerics=values["reuse.numerics"],
        lossy=values["reuse.lossy"],
        announce_interval_s=values["announce.interval_s"],
        public_enabled=values["public.enabled"],
        lan_discovery=values["lan.discovery"],
        guest_on_battery=values["guest.on_battery"],
        guest_metered=values["guest.metered"],
        api_enabled=values["api.enabled"],
        api_listen=values["api.listen"],
        api_listen_asked=origins["api.listen"] != "default",
        api_token=values["api.token"],
        api_allowed_hosts=values["api.allowed_hosts"],
        api_allowed_origins=values["api.allowed_origins"],
        api_max_body_bytes=values["api.max_body_bytes"],
        api_max_tokens=values["api.max_tokens"],
        api_model_aliases=values["api.model_aliases"],
        api_queue_requests=values["api.queue_requests"],
        api_drain_s=values["api.drain_s"],
        engine_idle_unload_s=values["engine.idle_unload_s"],
        live_bytes=values["engine.live_bytes"],
        remove_billing_line=values["prompt.remove_billing_line"],
        origins=origins,
    )
