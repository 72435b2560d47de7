"""``kvnet config``: the settings in force."""

from typing import Any

from kvnet_node.invocation import Context
from kvnet_node.output import columns


def show(*, context: Context) -> None:
    """Show every setting and where it came from: default, config.toml, environment or flag."""
    config = context.config()
    values = config.values()
    record: dict[str, Any] = {
        "type": "config show",
        "data_dir": str(context.data_dir),
        "config_file": str(context.data_dir / "config.toml"),
        "settings": {key: {"value": value, "origin": config.origins[key]} for key, value in values.items()},
    }

    def render(_: dict[str, Any]) -> str:
        rows = [(key, _shown(value), config.origins[key]) for key, value in values.items()]
        return columns([("data_dir", str(context.data_dir), ""), *rows], ("SETTING", "VALUE", "FROM"))

    file = context.data_dir / "config.toml"
    context.output.result(record, render)
    context.output.message(f"settings are read from {file}" + ("" if file.exists() else ", which does not exist yet"))


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
