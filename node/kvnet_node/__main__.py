"""``python -m kvnet_node`` is the ``kvnet`` command."""

import sys

from kvnet_node.app import main

sys.exit(main())
