"""Whether the model that state was computed with is on this machine: without it nothing can be asked."""

from kvnet_node.operations.artifacts import model_names_here
from kvnet_node.samples import model_names
from kvnet_node.services import Services


async def needed_model(services: Services, fingerprint: bytes) -> tuple[str, str]:
    """What the model of a fingerprint is called, and whether it is here.

    Returns:
        Its name, "" when nobody says; and "yes", "no", or, while models are here whose fingerprint is not known
        because they were never loaded, "likely" when one of them is called so, else "perhaps".
    """
    entries = [each for each in await services.engines.entries() if not each.broken and each.shareable is not False]
    loaded = await services.lane.run(model_names, services.paths.samples_dir)
    called = (await model_names_here(services)).get(fingerprint, "")
    if loaded.get(fingerprint) in {each.name for each in entries}:
        return called, "yes"
    unknown = {each.name for each in entries if each.name not in loaded.values()}
    if called in unknown:
        return called, "likely"
    return called, "perhaps" if unknown else "no"
