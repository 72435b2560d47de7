"""Time to first token of one question over a document of about 1,024 tokens, side by side: ``kvnet bench ttft``."""

from kvnet_node.benchmarking import ROUNDS, measure_ttft
from kvnet_node.commands.bench import render
from kvnet_node.demonstration import demo_model

PREFIX_TOKENS = 1024


def main() -> None:
    """Run the rounds and print medians and ratios."""
    model = demo_model(lambda _: None)
    for measured in measure_ttft(model, (PREFIX_TOKENS,), ROUNDS, print):
        print(render(measured))
