"""The `kvnet` command with the toy engine in place of MLX: prefill takes exactly as long as it is told to.

Run with what `kvnet` would be run with, the command itself first; `TOY_PREFILL_S` is seconds a token.
"""

import os
import sys
from functools import partial

from kvnet.engine.toy import ToyCosts, open_toy_engine
from kvnet_node import services
from kvnet_node.entry import main

if __name__ == "__main__":
    costs = ToyCosts(prefill_s_per_token=float(os.environ["TOY_PREFILL_S"]))
    # Where the node gets its engines from; nothing else is exchanged.
    if not hasattr(services, "open_engine"):
        sys.exit("expected kvnet_node.services to open engines, found that something else does")
    setattr(services, "open_engine", partial(open_toy_engine, costs=costs))  # noqa: B010 - of another type
    del sys.argv[1]
    sys.exit(main())
