"""The toy engine's costs run on trio's clock."""

from pathlib import Path

import trio
import trio.testing

from kvnet.engine.generations import Generated, GenerateRequest
from kvnet.engine.kv_state import Exported, ExportRequest
from kvnet.engine.scratch import new_pack, scratch_restore
from kvnet.engine.selftest import last
from kvnet.engine.toy import ToyCosts, open_toy_engine
from kvnet.engine.toy_model import toy_fingerprint

TOKENS = list(range(3, 203)) * 5


async def test_costs_are_slept_on_the_clock_and_restored_tokens_cost_no_prefill(
    autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    costs = ToyCosts(prefill_s_per_token=0.01, decode_s_per_token=0.5, restore_s_per_token=0.001)
    async with open_toy_engine(Path("toy"), costs=costs) as engine:
        request = ExportRequest(TOKENS[:900], None, new_pack(tmp_path / "pack"), 0)
        exported = await last(engine.export(request), Exported)
        assert abs(exported.prefill_s - 9.0) < 1e-6
        cold = await last(engine.generate(GenerateRequest(TOKENS, None, 4)), Generated)
        assert abs(cold.ttft_s - (9.99 + 0.5)) < 1e-6
        warm = await last(
            engine.generate(GenerateRequest(TOKENS, scratch_restore(engine.info, request, exported), 4)), Generated
        )
        assert abs(warm.ttft_s - (0.9 + 0.99 + 0.5)) < 1e-6
        assert warm.tokens == cold.tokens


def test_another_name_is_another_model() -> None:
    assert toy_fingerprint("a").hash != toy_fingerprint("b").hash
