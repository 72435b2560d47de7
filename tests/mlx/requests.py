"""Shorthand for what most engine tests do: export, generate, made-up prompts."""

import random
from pathlib import Path

from kvnet.engine.generations import Generated, GenerateRequest
from kvnet.engine.interface import Engine
from kvnet.engine.kv_state import Exported, ExportRequest, RestorePlan
from kvnet.engine.scratch import new_pack, scratch_restore
from kvnet.engine.selftest import last
from kvnet.format.codecs import Codec


def made_up_tokens(n: int, *, seed: int = 0) -> list[int]:
    """Token ids without special ones."""
    generator = random.Random(seed)
    return [generator.randrange(4, 260) for _ in range(n)]


async def export(
    engine: Engine, tokens: list[int], pack: Path, *, codec: Codec = Codec.RAW, restore: RestorePlan | None = None
) -> RestorePlan:
    """Exports a prefix into a new pack; a plan that restores all of it."""
    request = ExportRequest(tokens, restore, new_pack(pack), 0, codec=codec)
    return scratch_restore(engine.info, request, await last(engine.export(request), Exported))


async def generate(
    engine: Engine, tokens: list[int], restore: RestorePlan | None = None, *, max_tokens: int = 32
) -> Generated:
    """Generates greedily."""
    return await last(engine.generate(GenerateRequest(tokens, restore, max_tokens)), Generated)


def cut(plan: RestorePlan, n_tokens: int) -> RestorePlan:
    """The same plan, reusing only the first tokens."""
    return RestorePlan(plan.manifest, n_tokens, plan.chunks)
