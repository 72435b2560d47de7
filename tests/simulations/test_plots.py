from pathlib import Path

import pytest

from kvnet.errors import UsageError
from kvnet.format.codecs import Codec
from simulations import breakeven
from simulations.charts import bars, colours, figure, write
from simulations.chips import CHIPS, LINKS, MODELS, machine
from simulations.plots import losses
from tests.simulations.examples import result


def test_the_same_figure_gives_the_same_picture(tmp_path: Path) -> None:
    written = []
    for name in ("a", "b"):
        made, axes = figure("a finding", "what was run", height=2.0, width=3.0)
        bars(axes, ["own", "swarm"], [1.0, 2.0], ["1 GB", "2 GB"])
        written.append([file.read_bytes() for file in write(made, tmp_path / name, "plot")])
    assert written[0] == written[1]
    assert written[0][0].startswith(b"\x89PNG\r\n")
    # Letters are drawn as shapes; the comment before them says which.
    assert b"a finding" in written[0][1]


def test_a_policy_has_one_colour_everywhere() -> None:
    assert colours(["own", "swarm-q8", "swarm"])["swarm"] == colours(["swarm"])["swarm"]
    assert len(set(colours(["none", "own", "swarm", "a", "b", "central"]).values())) == 6


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="expected a folder that can be written"):
        write(figure("a", "b")[0], tmp_path / "file", "plot")


def test_losses_are_shares_of_requests_that_came_later() -> None:
    none = losses(result("swarm", speed=4.0), result("own", speed=2.0))
    assert none[0] == [0.0] * 5
    assert sum(none[2]) == 40
    every = losses(result("swarm", speed=1.0), result("own", speed=2.0))
    assert every[0] == [100.0] * 5
    assert sum(losses(result("swarm", requests=10), result("own", requests=11))[2]) == 10
    assert losses(result("swarm", requests=0), result("own"))[2] == [0]


def test_a_faster_link_gains_more_and_a_faster_chip_less() -> None:
    model = MODELS["qwen3-8b"]
    slow, fast = machine(CHIPS["m1"], model), machine(CHIPS["m5"], model)
    wifi, ethernet = LINKS["wifi"], LINKS["10gbe"]
    assert breakeven.gain(slow, model, ethernet, Codec.RAW) > breakeven.gain(slow, model, wifi, Codec.RAW)
    assert breakeven.gain(slow, model, wifi, Codec.RAW) > breakeven.gain(fast, model, wifi, Codec.RAW)
    assert breakeven.gain(fast, model, wifi, Codec.RAW) < 1 < breakeven.gain(slow, model, wifi, Codec.RAW)


@pytest.mark.nightly
def test_maps_of_what_fetching_gains_are_drawn(tmp_path: Path) -> None:
    files = breakeven.draw(tmp_path)
    assert {file.stem for file in files} == {"gain_raw", "gain_q8", "break_even"}
    assert all(file.stat().st_size > 10_000 for file in files)
