"""What other programs need to know of this node's HTTP endpoint."""

from kvnet.engine.model_folder import ModelEntry
from kvnet.errors import UnknownModelError, UsageError
from kvnet.store.names import NameBook, NamedVersion
from kvnet_node.api.model_names import model_list, parse_model, unknown_model
from kvnet_node.connecting import endpoint_url
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.requests import ConnectModel, ConnectRequest, ConnectResult


async def connect(context: OperationContext, request: ConnectRequest) -> ConnectResult:
    """The endpoint's address, the model to use, and all there are.

    Raises:
        UsageError: the endpoint is switched off.
        UnknownModelError: no such model or named context, or none chosen and several could be.
    """
    services = context.services
    if not services.config.api_enabled:
        raise UsageError("the HTTP endpoint of this node is switched off", hint="set api.enabled = true in config.toml")
    entries = await services.engines.entries()
    versions = await services.lane.run(_versions, services.names)
    name = parse_model(request.model)
    chosen = await services.engines.choose(name.model)
    default = chosen.name if name.model is None else await _default(context)
    models = [_offered(model) for model in model_list(entries, versions, {}, default)]
    wanted = f"{chosen.name}#{name.context}" if name.context else chosen.name
    found = next((model for model in models if model.id == wanted), None)
    if found is None:
        raise unknown_model(wanted, [model.id for model in models])
    return ConnectResult(
        url=endpoint_url([url.removeprefix("http://") for url in services.endpoint] or services.config.api_listen),
        running=context.serving,
        wants_token=bool(services.config.api_token),
        model=found,
        models=models,
    )


def _versions(names: NameBook) -> list[NamedVersion]:
    return [version for name in names.names() for version in names.versions(name)]


async def _default(context: OperationContext) -> str | None:
    try:
        entry: ModelEntry = await context.services.engines.choose(None)
    except UnknownModelError:
        return None
    return entry.name


def _offered(model: dict[str, object]) -> ConnectModel:
    window = model.get("context_window")
    return ConnectModel(str(model["id"]), window if isinstance(window, int) else None)
