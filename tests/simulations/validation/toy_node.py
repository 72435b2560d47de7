"""The `kvnet` command with the toy engine in place of MLX: prefill takes exactly as long as it is told to.

Run with what `kvnet` would be run with, the command itself first; `TOY_PREFILL_S` is seconds a token.
"""

import os
import sys
from functools import partial

from kvnet.engine.toy import ToyCosts, open_toy_engine
from kvnet_node import wiring
from kvnet_node.entry import main

if __name__ == "__main__":
    costs = ToyCosts(prefill_s_per_token=float(os.environ["TOY_PREFILL_S"]))
    # Where the node is composed, nothing else is exchanged.
    setattr(wiring, "open_engine", partial(open_toy_engine, costs=costs))  # noqa: B010 - of another type
    del sys.argv[1]
    sys.exit(main())
