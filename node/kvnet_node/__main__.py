"""``python -m kvnet_node`` is the ``kvnet`` command."""

import sys

from kvnet_node.entry import main

sys.exit(main())
