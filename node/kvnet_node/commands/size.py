"""``kvnet size``: K/V sizes from config.json alone."""

from kvnet_node.invocation import Context


def size(model: str, /, *, tokens: int | None = None, users: int = 1, codec: str = "raw", context: Context) -> None:
    """Work out the K/V size of a model from its config.json: bytes per token, RAM, disk, seconds over a network.

    Args:
        model: a model's name, its folder, or a config.json.
        tokens: tokens of one user; 8,000, 32,000 and 128,000 by default.
        users: users with a context of their own each.
        codec: raw, shuffle+zstd-1 or q8.
    """
    from kvnet.engine.models import find_config
    from kvnet.engine.sizing import size_report
    from kvnet_node.models import models_here

    name, config = find_config(model, models_here(context.config(), context.data_dir))
    report = size_report(config, model=name, n_tokens=tokens, users=users, codec=codec)
    context.output.result(report.as_json(), lambda _: "\n".join(report.lines()))
